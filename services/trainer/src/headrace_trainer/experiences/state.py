"""The state of a lineage beside its tensors (P4): what was read, and what became of it.

The state is saved as a whole, together with the weights it belongs to. Its offsets say which part of the stream was
read. Each experience of that part is trained (the state has its outcome and its contribution), dropped (the state has
its outcome) or waiting (the state has the experience itself). So a restart loses nothing and repeats nothing, even if
the bus delivers records again or has deleted them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from headrace_runtime.clock import epoch_ms
from headrace_schemas import BatchRecord, Experience, Read, Restored, TrainingOutcome, Undone
from headrace_schemas.base import Model
from headrace_schemas.events.checkpoint import LISTED_MAX, DropReason
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.experiences.admission import (
    EXCLUDED,
    AdmissionLimits,
    Decision,
    decide,
    due_of,
    expired,
    objection,
    versions_of,
)
from headrace_trainer.experiences.due import Due
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.trained_experience import TrainedExperience
from headrace_trainer.experiences.waiting import Waiting
from headrace_trainer.experiences.window import Contribution, Entry, Window
from headrace_trainer.metrics import DROPPED, DUPLICATES, TRAINED, UNDONE, WAITING, WAITING_TOKENS
from headrace_trainer.settings import MemorySettings

Offsets = dict[str, dict[int, int]]
"""Topic to partition to the offset of the next record to read."""


_DETAIL_LENGTH_MAX = 200


class Reported(NamedTuple):
    """What a save reports: what became of experiences since the one before it."""

    outcomes: tuple[TrainingOutcome, ...] = ()
    undone: tuple[Undone, ...] = ()
    restored: tuple[Restored, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    read: tuple[Read, ...] = ()


class Unreported(Model):
    """What waits for the next account, because the last one had no room for it."""

    outcomes: tuple[TrainingOutcome, ...] = ()
    undone: tuple[Undone, ...] = ()
    restored: tuple[Restored, ...] = ()


class LineageState:
    """Mutable. Its owner calls one method at a time. No method blocks."""

    def __init__(
        self,
        history: History,
        limits: AdmissionLimits,
        memory: MemorySettings,
        *,
        baselines: Baselines | None = None,
        window: Window | None = None,
        waiting: Sequence[Waiting] = (),
        offsets: Offsets | None = None,
        promoted: tuple[str, ...] = (),
        steps: int = 0,
        outcomes: Sequence[TrainingOutcome] = (),
        undone: Sequence[Undone] = (),
        restored: Sequence[Restored] = (),
        left_out: Sequence[str] = (),
    ) -> None:
        self.limits = limits
        self._memory = memory
        self.history = history
        self.baselines = baselines or Baselines()
        self.window = window or Window()
        self._waiting = {item.experience.experience_id: item for item in waiting}
        self._tokens = sum(item.tokens for item in waiting)
        self.offsets = offsets or {}
        self.promoted = promoted or (history.head,)
        """The champion and the previous champion; at first the version that the lineage started from."""
        self.steps = steps
        self.outcomes = list(outcomes)
        """Outcomes since the last save."""
        self.undone = list(undone)
        """Outcomes that were taken back since the last save."""
        self.restored = list(restored)
        """Revisions that the weights hold again, since the last save. Nothing changes them before they are saved."""
        self.batches: list[BatchRecord] = []
        """Batches since the last save."""
        self.read: list[Read] = []
        """What was read after the last of these batches."""
        self.left_out = list(left_out)
        """Experiences that no step can train, since the last batch."""
        self._gauge()

    @property
    def waiting(self) -> Sequence[Waiting]:
        """In order of arrival."""
        return tuple(self._waiting.values())

    @property
    def room(self) -> int:
        """Experiences that may still be admitted."""
        if self._tokens >= self._memory.queue_tokens:
            return 0
        return max(0, self._memory.queue_experiences - len(self._waiting))

    @property
    def current(self) -> str | None:
        """The version that the weights equal, None when steps have moved them on from it."""
        return self.history.head if self.steps == self.history.head_step else None

    def passed(self, topic: str, partition: int, offset: int, *, noted: bool) -> None:
        """Move the offset past a record that was admitted or refused. `noted`: batches depend on its order (P9)."""
        self.offsets.setdefault(topic, {})[partition] = offset + 1
        if not noted:
            return
        if self.read and self.read[-1].partition == partition:
            self.read.pop()
        self.read.append(Read(partition=partition, until=offset + 1))

    def admit(self, experience: Experience, place: tuple[int, int], now: datetime) -> Decision:
        """Decide about an experience that arrived, and record it. `place` is its partition and offset on the bus."""
        name = experience.experience_id
        entry = self.window.get(name)
        decision = decide(self.bounded(experience), entry, self.history, self.steps, self.limits)
        if decision.fate == "ignore":
            DUPLICATES.inc()
            return decision
        ranges = self.baselines.ranges.note(experience, self.limits.ranges)
        if ranges is not self.baselines.ranges:
            self.baselines = self.baselines.model_copy(update={"ranges": ranges})
        versions = versions_of(experience)
        self.window.see(name, experience.revision, versions, place if experience.branch is not None else None, now)
        replaced = self._waiting.get(name) if decision.replaces else None
        if replaced is not None:
            self._record(replaced.experience, "superseded")
        if decision.fate == "queue":
            self._put(Waiting(experience=experience, since_ms=replaced.since_ms if replaced else epoch_ms(now)))
            return decision
        if replaced is not None:
            self._remove(name)
        self._record(experience, decision.reason, decision.detail)
        return decision

    def is_correction(self, item: Waiting) -> bool:
        """Whether an earlier revision of the same experience was trained, and nothing of it is to be compared with
        others for the first time."""
        entry = self.window.get(item.experience.experience_id)
        if entry is None or not entry.trained or self.limits.signals.rewards_alone:
            return entry is not None and entry.trained
        found = self.due(item)
        return bool(found) and not any(one.missing is None for one in found)

    def due(self, item: Waiting) -> tuple[Due, ...]:
        """What of it is to be trained."""
        entry = self.window.get(item.experience.experience_id)
        return due_of(self.bounded(item.experience), entry, self.history, self.steps, self.limits)

    def bounded(self, experience: Experience) -> Experience:
        """Return the experience with its stray rewards winsorised, as it is trained.

        A reward beyond `reward_max` stays as it is, and the experience is dropped for it.
        """
        if abs(experience.reward or 0.0) > self.limits.reward_max:
            return experience
        return self.baselines.ranges.bound(experience, self.limits.ranges)

    def open_answers(self, item: Waiting) -> tuple[Example, ...]:
        """The answers of it that can only be trained with another one. One that was trained needs none: it is
        corrected."""
        return tuple(one.example for one in self.due(item) if one.new and one.example.pair)

    def has_corrections(self, item: Waiting) -> bool:
        """Whether there is something of it to train that needs no other answer."""
        return any(not (one.new and one.example.pair) for one in self.due(item))

    def go_back(self, version: str) -> dict[str, tuple[int, ...]]:
        """Follow the weights back to `version`. Returns the experiences that the weights have lost, each with the
        revisions that are undone. Revisions that only the weights of `version` hold are restored."""
        before, after = self.history, self.history.moved(version, self.steps)
        lost: dict[str, tuple[int, ...]] = {}
        for name in self.window:
            entry = self.window.get(name)
            if entry is None or not entry.trained:
                continue
            had, has = entry.held_revisions(before, self.steps), entry.held_revisions(after, self.steps)
            if had - has:
                lost[name] = tuple(sorted(had - has))
            for revision in sorted(has - had):
                self._restore(name, revision)
        self.history = after
        return lost

    def _restore(self, name: str, revision: int) -> None:
        item = self._waiting.get(name)
        if item is not None and item.experience.revision == revision:
            self._remove(name)
        self.restored.append(Restored(experience_id=name, revision=revision))

    def places(self, names: Iterable[str]) -> dict[tuple[int, int], str]:
        """Where on the bus the experiences are that can be trained again, up to the room in the queue."""
        found: dict[tuple[int, int], str] = {}
        for name in names:
            entry = self.window.get(name)
            if entry is None or name in self._waiting or len(found) >= self.room:
                continue
            staleness = self.history.staleness(entry.versions)
            if staleness is not None and staleness <= self.limits.max_staleness and entry.partition >= 0:
                found[entry.partition, entry.offset] = name
        return found

    def undo(self, lost: Mapping[str, Sequence[int]], found: Mapping[str, Experience], now: datetime) -> None:
        """Record what `go_back` returned. `found` are experiences that were read again from the bus. Their newest
        revisions are queued again if they are fresh enough, even if they had been dropped."""
        for name, revisions in lost.items():
            entry, experience = self.window.get(name), found.get(name)
            assert entry is not None, "nothing is evicted between two saves"
            again = None
            if experience is not None and experience.revision == entry.revisions[-1] and self.room:
                reason = objection(self.bounded(experience), entry, self.history, self.steps, self.limits)
                tried = len({one.step for one in entry.contributions if one.revision == experience.revision})
                # Only once: a version that was trained on the same experiences may be refused for the same reason.
                if reason is None and name not in self._waiting and tried <= 1:
                    again = experience.revision
            if again is not None and experience is not None:
                self.put_again(experience, now)
            self.note_undone(name, revisions, again)

    def exclude(self, version: str, *, ends: bool = False) -> None:
        """Nothing that `version` answered is trained from now on; `ends`: it is again."""
        self.history = self.history.excluding(version, ends=ends)

    def waits(self, name: str) -> bool:
        return name in self._waiting

    def put_again(self, experience: Experience, now: datetime) -> None:
        """Queue what was read again from the bus."""
        self._put(Waiting(experience=experience, since_ms=epoch_ms(now)))

    def note_undone(self, name: str, revisions: Sequence[int], again: int | None = None) -> None:
        """The outcomes of these revisions are taken back; revision `again` is queued."""
        for revision in sorted({*revisions, *(() if again is None else (again,))}):
            UNDONE.labels(str(revision == again).lower()).inc()
            self.undone.append(Undone(experience_id=name, revision=revision, queued=revision == again))

    def drop(self, item: Waiting, reason: DropReason, detail: str | None = None) -> None:
        """Take it out of the queue for good."""
        self._remove(item.experience.experience_id)
        self._record(item.experience, reason, detail)

    def leave_out(self, item: Waiting, reason: str) -> None:
        """Drop it as `invalid`, because the batch that it was cut for cannot be trained with it."""
        self.drop(item, "invalid", reason[:_DETAIL_LENGTH_MAX])
        self.left_out = [*self.left_out, item.experience.experience_id][-LISTED_MAX:]

    def sweep(self) -> None:
        """Drop experiences that became too old, or needless, while they waited (P5: also right after a restart)."""
        for item in self.waiting:
            entry = self.window.get(item.experience.experience_id)
            found = expired(self.bounded(item.experience), entry, self.history, self.steps, self.limits)
            if found is not None:
                self.drop(item, found.reason, found.detail)

    def cut(self, digest: str, experiences: int) -> None:
        """Record a batch, so that it can be built again. Called after `stepped` if there was a step."""
        read, left_out = tuple(self.read), tuple(self.left_out)
        batch = BatchRecord(step=self.steps, experiences=experiences, digest=digest, read=read, left_out=left_out)
        self.batches.append(batch)
        self.read.clear()
        self.left_out.clear()

    @property
    def moved(self) -> bool:
        """Whether outcomes were undone or restored since the last save."""
        return bool(self.undone or self.restored)

    def hand_over(self) -> Reported:
        """Return what is to be reported, for a save that holds it from now on, up to as much as one account takes.

        Outcomes come first: they are those from before anything was undone or restored.
        """
        held_back = (self.undone, self.restored) if len(self.outcomes) > LISTED_MAX else ()
        limits = [0 if any(kept is late for late in held_back) else LISTED_MAX for kept in self._reported]
        reported = Reported(*(tuple(kept[:limit]) for kept, limit in zip(self._reported, limits, strict=True)))
        for kept, limit in zip(self._reported, limits, strict=True):
            del kept[:limit]
        return reported

    def take_back(self, reported: Reported) -> None:
        """The save did not come about. What was reported since comes after it."""
        for kept, earlier in zip(self._reported, reported, strict=True):
            kept[:0] = earlier

    @property
    def _reported(self) -> tuple[list[Any], ...]:
        """As in `Reported`."""
        return self.outcomes, self.undone, self.restored, self.batches, self.read

    def stepped(self, trained: Sequence[TrainedExperience], baselines: Baselines, token_weight: float = 0.0) -> None:
        """Record a step: contributions, outcomes, baselines. Called once the weights have changed. `token_weight` is
        the factor of the gradients of experiences that correct nothing."""
        self.steps += 1
        self.baselines = baselines
        for one in trained:
            experience = one.waiting.experience
            entry = self.window.get(experience.experience_id)
            assert entry is not None, "an experience that waits is never evicted"
            weight = token_weight * one.factor if one.token_weight is None else one.token_weight
            contribution = Contribution(
                revision=experience.revision,
                step=self.steps,
                advantage=one.advantage,
                token_weight=weight,
                what=one.contributed,
            )
            update: dict[str, object] = {"contributions": (*entry.contributions, contribution)}
            if not one.example.part and (one.anew or all(earlier.part for earlier in entry.contributions)):
                update |= {"baseline": one.baseline, "scale": one.scale, "turn_terms": one.turn_terms}
            self.window.put(experience.experience_id, entry.model_copy(update=update))
        for experience in {one.waiting.experience.experience_id: one.waiting.experience for one in trained}.values():
            self._remove(experience.experience_id)
            if self.history.excluded_of(versions_of(experience)) is not None:
                self._record(experience, EXCLUDED.reason, EXCLUDED.detail)
            else:
                self._record(experience, None)

    def snapshot(self) -> dict[str, object]:
        """The fields of `Saved` that this state holds. A copy: later calls do not change it."""
        return {
            "offsets": {topic: dict(offsets) for topic, offsets in self.offsets.items()},
            "waiting": self.waiting,
            "window": self.window.copy(),
            "promoted": self.promoted,
            "excluded": tuple(sorted(self.history.excluded)),
            "baselines": self.baselines,
            "steps": self.steps,
            "left_out": tuple(self.left_out),
            "unreported": Unreported(outcomes=self.outcomes, undone=self.undone, restored=self.restored),
        }

    def forget(self, now: datetime) -> None:
        """Keep the window within its bounds. Experiences that wait stay. Trained ones stay while they are fresh
        enough to be trained again, by the present weights or by those that the lineage may go back to."""
        places = [self.history, *(self.history.moved(version, self.steps) for version in self.promoted)]

        def needed(name: str, entry: Entry) -> bool:
            # What nobody sampled is always fresh: it is kept by count and age alone.
            found = [history.staleness(entry.versions) for history in places if entry.trained and entry.versions]
            fresh = any(distance is not None and distance <= self.limits.max_staleness for distance in found)
            return fresh or name in self._waiting

        age = timedelta(seconds=self._memory.window_age_s)
        self.window.evict(now, self._memory.window_experiences, age, needed)

    def _record(self, experience: Experience, dropped: DropReason | None, detail: str | None = None) -> None:
        self.outcomes.append(
            TrainingOutcome(
                experience_id=experience.experience_id,
                revision=experience.revision,
                turn_ids=experience.turn_ids,
                dropped=dropped,
                detail=detail,
            )
        )
        if dropped is None:
            TRAINED.inc()
        else:
            DROPPED.labels(detail or dropped).inc()

    def _put(self, item: Waiting) -> None:
        """Add, or replace in the same place."""
        old = self._waiting.get(item.experience.experience_id)
        self._waiting[item.experience.experience_id] = item
        self._tokens += item.tokens - (old.tokens if old else 0)
        self._gauge()

    def _remove(self, name: str) -> None:
        old = self._waiting.pop(name, None)
        self._tokens -= old.tokens if old else 0
        self._gauge()

    def _gauge(self) -> None:
        WAITING.set(len(self._waiting))
        WAITING_TOKENS.set(self._tokens)
