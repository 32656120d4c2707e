"""The state of a lineage besides its tensors: positions in the stream, waiting experiences, outcomes.

The state is saved as a whole, together with the weights it belongs to. Its offsets define the part of the stream that
was read. Each experience of that part is trained (the state has its outcome and its contribution), dropped (the state
has its outcome) or waiting (the state has the experience itself). So a restart loses and repeats no experience, even if
the bus delivers records again or has deleted them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace_runtime.clock import epoch_ms
from headrace_schemas import BatchRecord, Experience, PartitionRead, RestoredOutcome, RevertedOutcome, TrainingOutcome
from headrace_schemas.events.checkpoint import LISTED_MAX, DropReason
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.experiences import reports
from headrace_trainer.experiences.admission import (
    EXCLUDED,
    AdmissionLimits,
    Decision,
    decide,
    find_expiry,
    find_objection,
    pending_updates_of,
    versions_of,
)
from headrace_trainer.experiences.examples import Example, PendingUpdate
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.queue import CachedUpdates, WaitingQueue
from headrace_trainer.experiences.reports import Offsets, SaveReport, TrainedExperience, UnreportedOutcomes
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.experiences.window import AGE_MAX, Contribution, Entry, Window
from headrace_trainer.metrics import DROPPED, DUPLICATES, TRAINED, UNDONE
from headrace_trainer.settings import MemorySettings

_DETAIL_LENGTH_MAX = 200


class LineageState:
    """Mutable state of a lineage besides its tensors. Its owner calls one method at a time. No method blocks."""

    def __init__(
        self,
        history: History,
        limits: AdmissionLimits,
        memory: MemorySettings,
        *,
        baselines: Baselines | None = None,
        window: Window | None = None,
        waiting: Sequence[WaitingExperience] = (),
        offsets: Offsets | None = None,
        promoted: tuple[str, ...] = (),
        steps: int = 0,
        outcomes: Sequence[TrainingOutcome] = (),
        undone: Sequence[RevertedOutcome] = (),
        restored: Sequence[RestoredOutcome] = (),
        left_out: Sequence[str] = (),
    ) -> None:
        self.limits = limits
        self._memory = memory
        self.history = history
        self.baselines = baselines or Baselines()
        self.window = window or Window()
        self.queue = WaitingQueue(memory, waiting)
        self._updates: dict[str, CachedUpdates] = {}
        self.offsets = offsets or {}
        self.promoted = promoted or (history.head,)
        """The champion and the previous champion; at first the version that the lineage started from."""
        self.steps = steps
        self.outcomes = list(outcomes)
        """Outcomes since the last save."""
        self.undone = list(undone)
        """Outcomes that were reversed since the last save."""
        self.restored = list(restored)
        """Revisions that the weights hold again since the last save. They stay unchanged until they are saved."""
        self.batches: list[BatchRecord] = []
        """Batches since the last save."""
        self.read: list[PartitionRead] = []
        """Ranges of the topic that were read after the last of these batches."""
        self.left_out = list(left_out)
        """Experiences that no step can train, since the last batch."""

    @property
    def waiting(self) -> Sequence[WaitingExperience]:
        """Experiences that were read but not trained yet, in order of arrival."""
        return self.queue.items

    @property
    def room(self) -> int:
        """Number of experiences that the queue may still admit."""
        return self.queue.room

    @property
    def current(self) -> str | None:
        """Version whose weights equal the present ones, None when steps have changed them since."""
        return self.history.head if self.steps == self.history.head_step else None

    def record_offset(self, topic: str, partition: int, offset: int, *, reported: bool) -> None:
        """Set the next offset to read of a partition, after the record at `offset` was handled.

        Args:
            reported: whether reports contain the record's position in the order of reading, on which batches depend.
        """
        self.offsets.setdefault(topic, {})[partition] = offset + 1
        if not reported:
            return
        if self.read and self.read[-1].partition == partition:
            self.read.pop()
        self.read.append(PartitionRead(partition=partition, until=offset + 1))

    def admit(
        self, experience: Experience, position: tuple[int, int], now: datetime, size_bytes: int | None = None
    ) -> Decision:
        """Record the decision about an experience at a partition and offset. `size_bytes`: see `WaitingQueue.put`."""
        name = experience.experience_id
        entry = self.window.get(name)
        decision = decide(self.winsorise_rewards(experience), entry, self.history, self.steps, self.limits)
        if decision.action == "ignore":
            DUPLICATES.inc()
            return decision
        ranges = self.baselines.ranges.record_strays(experience, self.limits.ranges)
        if ranges is not self.baselines.ranges:
            self.baselines = self.baselines.model_copy(update={"ranges": ranges})
        versions = versions_of(experience, self.limits.rules)
        self.window.record_arrival(
            name, experience.revision, versions, position if experience.branch is not None else None, now
        )
        replaced = self.queue.get(name) if decision.replaces else None
        if replaced is not None:
            self._record(replaced.experience, "superseded")
        if decision.action == "queue":
            since_ms = replaced.since_ms if replaced else epoch_ms(now)
            self.queue.put(WaitingExperience(experience=experience, since_ms=since_ms), size_bytes)
            return decision
        if replaced is not None:
            self._remove(name)
        self._record(experience, decision.reason, decision.detail)
        return decision

    def is_correction(self, item: WaitingExperience) -> bool:
        """Return whether the experience was trained before and its correction needs no comparison with other runs."""
        entry = self.window.get(item.experience.experience_id)
        if entry is None or not entry.trained or self.limits.signals.rewards_alone:
            return entry is not None and entry.trained
        updates = self.pending_updates(item)
        return bool(updates) and not any(update.advantage is None for update in updates)

    def pending_updates(self, item: WaitingExperience) -> tuple[PendingUpdate, ...]:
        """Return the updates that the weights still lack for a waiting experience."""
        name = item.experience.experience_id
        experience, entry = self.winsorise_rewards(item.experience), self.window.get(name)
        cached = self._updates.get(name)
        if cached is not None and cached.is_valid_for(experience, entry, self.history, self.steps):
            return cached.updates
        updates = pending_updates_of(experience, entry, self.history, self.steps, self.limits)
        if name in self.queue:
            self._updates[name] = CachedUpdates(experience, entry, self.history, self.steps, updates)
        return updates

    def winsorise_rewards(self, experience: Experience) -> Experience:
        """Return the experience with winsorised outliers; unchanged if its reward is beyond `reward_max`."""
        if abs(experience.reward or 0.0) > self.limits.reward_max:
            return experience
        return self.baselines.ranges.winsorise(experience, self.limits.ranges)

    def open_answers(self, item: WaitingExperience) -> tuple[Example, ...]:
        """Return the untrained examples of an experience that need the other example of their pair in their batch."""
        return tuple(update.example for update in self.pending_updates(item) if update.is_new and update.example.pair)

    def has_corrections(self, item: WaitingExperience) -> bool:
        """Return whether the experience has an update that can be trained without the other example of a pair."""
        return any(not (update.is_new and update.example.pair) for update in self.pending_updates(item))

    def go_back(self, version: str) -> dict[str, tuple[int, ...]]:
        """Reset the history to `version`, after the weights were reset to that version.

        Revisions that the weights contain again are recorded as restored.

        Returns:
            The experiences whose training the weights no longer contain: the lost revisions by experience id.
        """
        before, after = self.history, self.history.rewind(version, self.steps)
        lost: dict[str, tuple[int, ...]] = {}
        for name in self.window:
            entry = self.window.get(name)
            if entry is None or not entry.trained:
                continue
            had, has = entry.revisions_in_weights(before, self.steps), entry.revisions_in_weights(after, self.steps)
            if had - has:
                lost[name] = tuple(sorted(had - has))
            for revision in sorted(has - had):
                self._restore(name, revision)
        self.history = after
        return lost

    def _restore(self, name: str, revision: int) -> None:
        item = self.queue.get(name)
        if item is not None and item.experience.revision == revision:
            self._remove(name)
        self.restored.append(RestoredOutcome(experience_id=name, revision=revision))

    def bus_positions(self, names: Iterable[str]) -> dict[tuple[int, int], str]:
        """Return the ids of the experiences that can be trained again, by partition and offset on the bus.

        There are at most as many as the queue can still admit.
        """
        positions: dict[tuple[int, int], str] = {}
        for name in names:
            entry = self.window.get(name)
            if entry is None or name in self.queue or len(positions) >= self.room:
                continue
            staleness = self.history.staleness(entry.versions)
            if staleness is not None and staleness <= self.limits.max_staleness and entry.partition >= 0:
                positions[entry.partition, entry.offset] = name
        return positions

    def undo(self, lost: Mapping[str, Sequence[int]], experiences: Mapping[str, Experience], now: datetime) -> None:
        """Record which revisions the weights lost when `go_back` reset them, and queue those experiences again.

        An experience is queued with its newest revision, unless that is too old by now, the queue has no room, or more
        than one step has already trained it.

        Args:
            lost: revisions of each experience whose training is no longer in the weights, as `go_back` returned them.
            experiences: the experiences, read again from the bus. Those that the bus no longer has are missing.
            now: the present time, from which their wait for a batch counts.
        """
        for name, revisions in lost.items():
            entry, experience = self.window.get(name), experiences.get(name)
            assert entry is not None, "nothing is evicted between two saves"
            again = None
            if experience is not None and experience.revision == entry.revisions[-1] and self.room:
                reason = find_objection(
                    self.winsorise_rewards(experience), entry, self.history, self.steps, self.limits
                )
                attempts = len({past.step for past in entry.contributions if past.revision == experience.revision})
                # Queued once only: a version that was trained on the same experiences may be refused for the same
                # reason.
                if reason is None and name not in self.queue and attempts <= 1:
                    again = experience.revision
            if again is not None and experience is not None:
                self.requeue(experience, now)
            self.record_reversal(name, revisions, again)

    def exclude(self, version: str, *, ends: bool = False) -> None:
        """Exclude the answers of `version` from training, or include them again with `ends`."""
        self.history = self.history.with_exclusion(version, ends=ends)

    def is_waiting(self, name: str) -> bool:
        return name in self.queue

    def requeue(self, experience: Experience, now: datetime) -> None:
        """Queue an experience that was read again from the bus."""
        self.queue.put(WaitingExperience(experience=experience, since_ms=epoch_ms(now)))

    def record_reversal(self, name: str, revisions: Sequence[int], again: int | None = None) -> None:
        """Record that the outcomes of these revisions no longer hold. Revision `again`, if not None, is queued
        again."""
        for revision in sorted({*revisions, *(() if again is None else (again,))}):
            UNDONE.labels(str(revision == again).lower()).inc()
            self.undone.append(RevertedOutcome(experience_id=name, revision=revision, queued=revision == again))

    def drop(self, item: WaitingExperience, reason: DropReason, detail: str | None = None) -> None:
        """Remove a waiting experience from the queue for good."""
        self._remove(item.experience.experience_id)
        self._record(item.experience, reason, detail)

    def leave_out(self, item: WaitingExperience, reason: str) -> None:
        """Drop an experience as `invalid`, because a batch with it cannot be trained."""
        self.drop(item, "invalid", reason[:_DETAIL_LENGTH_MAX])
        self.left_out = [*self.left_out, item.experience.experience_id][-LISTED_MAX:]

    def sweep(self) -> None:
        """Drop waiting experiences that have become too stale, or that would no longer change the weights."""
        for item in self.waiting:
            entry = self.window.get(item.experience.experience_id)
            cause = find_expiry(self.winsorise_rewards(item.experience), entry, self.history, self.steps, self.limits)
            if cause is not None:
                self.drop(item, cause.reason, cause.detail)

    def record_batch(self, digest: str, experiences: int) -> None:
        """Record the digest of a batch, which a replay compares with its own. Call it after `record_step`, if any."""
        read, left_out = tuple(self.read), tuple(self.left_out)
        batch = BatchRecord(step=self.steps, experiences=experiences, digest=digest, read=read, left_out=left_out)
        self.batches.append(batch)
        self.read.clear()
        self.left_out.clear()

    @property
    def has_reversals(self) -> bool:
        """Whether outcomes were undone or restored since the last save."""
        return bool(self.undone or self.restored)

    def take_report(self) -> SaveReport:
        """Remove and return the outcomes to report with the next save, at most as many as one event may contain.

        Earlier outcomes are reported before the reversals and restorations that followed them.
        """
        held_back = (self.undone, self.restored) if len(self.outcomes) > LISTED_MAX else ()
        limits = [0 if any(items is late for late in held_back) else LISTED_MAX for items in self._reported]
        reported = SaveReport(*(tuple(items[:limit]) for items, limit in zip(self._reported, limits, strict=True)))
        for items, limit in zip(self._reported, limits, strict=True):
            del items[:limit]
        return reported

    def put_back(self, reported: SaveReport) -> None:
        """Put the items of a report back in front of the items to report, because its save failed."""
        for items, earlier in zip(self._reported, reported, strict=True):
            items[:0] = earlier

    @property
    def _reported(self) -> tuple[list[Any], ...]:
        """Lists of items that the next save reports, in the order of the fields of `SaveReport`."""
        return self.outcomes, self.undone, self.restored, self.batches, self.read

    def record_step(
        self, trained: Sequence[TrainedExperience], baselines: Baselines, token_weight: float = 0.0
    ) -> None:
        """Record a step: contributions, outcomes, baselines. Call it once the weights have changed.

        Args:
            trained: examples of the step.
            baselines: baselines after the step.
            token_weight: token weight of examples that were trained for the first time.
        """
        self.steps += 1
        self.baselines = baselines
        for record in trained:
            experience = record.waiting.experience
            entry = self.window.get(experience.experience_id)
            assert entry is not None, "an experience that waits is never evicted"
            weight = token_weight * record.factor if record.token_weight is None else record.token_weight
            contribution = Contribution(
                revision=experience.revision,
                step=self.steps,
                advantage=record.advantage,
                token_weight=weight,
                what=record.contribution_detail,
            )
            update: dict[str, object] = {"contributions": (*entry.contributions, contribution)}
            if not record.example.part and (record.reestimated or all(earlier.part for earlier in entry.contributions)):
                update |= {"baseline": record.baseline, "scale": record.scale, "turn_terms": record.turn_terms}
            self.window.put(experience.experience_id, entry.model_copy(update=update))
        for name, records in reports.group_by_experience(trained).items():
            experience = records[-1].waiting.experience
            self._remove(name)
            if self.history.find_excluded(versions_of(experience, self.limits.rules)) is not None:
                self._record(experience, EXCLUDED.reason, EXCLUDED.detail)
            else:
                self._record(experience, None, records=records)

    def snapshot(self) -> dict[str, object]:
        """Return a copy of this state as fields of `SavedState`, which later calls do not change."""
        return {
            "offsets": {topic: dict(offsets) for topic, offsets in self.offsets.items()},
            "waiting": self.waiting,
            "window": self.window.copy(),
            "promoted": self.promoted,
            "excluded": tuple(sorted(self.history.excluded)),
            "baselines": self.baselines,
            "steps": self.steps,
            "left_out": tuple(self.left_out),
            "unreported": UnreportedOutcomes(outcomes=self.outcomes, undone=self.undone, restored=self.restored),
        }

    def evict_old_entries(self, now: datetime) -> None:
        """Evict entries from the window, as far as its bounds require.

        Experiences that wait stay. Trained ones stay while they are fresh enough to be trained again, by the present
        weights or by those that the lineage may go back to.
        """
        histories = [self.history, *(self.history.rewind(version, self.steps) for version in self.promoted)]

        def needed(name: str, entry: Entry) -> bool:
            # Written tokens are always fresh, so only count and age bound their entries.
            distances = [history.staleness(entry.versions) for history in histories if entry.trained and entry.versions]
            fresh = any(distance is not None and distance <= self.limits.max_staleness for distance in distances)
            return fresh or name in self.queue

        self.window.evict(now, self._memory.window_experiences, AGE_MAX, needed)

    def _record(
        self,
        experience: Experience,
        dropped: DropReason | None,
        detail: str | None = None,
        records: Sequence[TrainedExperience] = (),
    ) -> None:
        """Record the outcome of a revision: the reason why it was dropped, or its trained examples in `records`."""
        left_out = self.limits.left_out_turns(experience, {record.example.turn_id for record in records})
        outcome = reports.training_outcome(experience, dropped, detail, left_out, records, self.limits.rules)
        self.outcomes.append(outcome)
        (TRAINED if dropped is None else DROPPED.labels(outcome.reason_name)).inc()

    def _remove(self, name: str) -> None:
        self.queue.remove(name)
        self._updates.pop(name, None)
