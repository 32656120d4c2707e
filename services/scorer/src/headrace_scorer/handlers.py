"""The scorer's handlers of stream events. Their effects depend only on the event, the tables and the reward functions.

Trajectories that other programs send over Kafka are checked by the same rules that the gateway applies to HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.wire import Received
from headrace_runtime.storage.isolation import process_batch
from headrace_runtime.stream.processor import Handling, Unfinished
from headrace_schemas import Event, Feedback, Reward, Trajectory
from headrace_schemas.events.envelope import OWN_SOURCE
from headrace_schemas.events.opinion import values_of
from headrace_schemas.rules.ingest import OWN_END_REASON, KnownModels, find_objection
from headrace_schemas.values.ids import owner_of
from headrace_scorer import ledger, rematches, store
from headrace_scorer.feedback_entries import thumbs_of
from headrace_scorer.feedback_matching import FeedbackSet, PlacedFeedback
from headrace_scorer.learned.store import store_thumbs
from headrace_scorer.ledger import SOURCES_MAX
from headrace_scorer.scores import ScoreStore, TrajectoryScore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings

Lookup = Callable[[str], Awaitable[KnownModels]]
"""Function that returns the known models, with the vocabulary of the named one. It may raise `Unavailable`."""


async def no_known_models(_model: str) -> KnownModels:
    """Return an empty set of models: the look-up of a scorer that does not read the topics about models."""
    return KnownModels()


async def check_ingested(trajectory: Trajectory, received: Received, known_models: Lookup) -> None:
    """Check a trajectory that another program sent against the rules of ingestion.

    Trajectories of the collector are not checked.

    Raises:
        InvalidEvent: the trajectory breaks a rule.
    """
    from_headrace = received.envelope.source.startswith(OWN_SOURCE)
    if from_headrace and trajectory.end_reason != OWN_END_REASON:
        return
    if not from_headrace:
        _check_fields(received)
    violation = find_objection(trajectory, await known_models(trajectory.model))
    if violation is not None:
        raise InvalidEvent(violation.code, str(violation))


def _check_fields(received: Received) -> None:
    """Refuse unknown fields in trajectories of other programs.

    Unknown fields from services of Headrace are allowed, because these services may be newer than the scorer.

    Raises:
        InvalidEvent: the trajectory has a field that this release does not know.
    """
    value = received.record.value
    if value is None or received.envelope.dataref is not None:
        return
    try:
        Trajectory.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        text = f"{'.'.join(map(str, first['loc']))}: not a field of a trajectory; leave it out"
        raise InvalidEvent("unknown_field", text) from None


_REMATCHED_AT_ONCE_MAX = 25


@dataclass(frozen=True, slots=True)
class Scorer:
    """Stream handlers of the topics `trajectories`, `feedback` and `rewards`."""

    settings: ScorerSettings
    cache: store.TrajectoryCache
    scores: ScoreStore
    scoring: Scoring
    known_models: Lookup = no_known_models

    async def on_trajectory(self, trajectory: Trajectory, handling: Handling) -> Sequence[Event]:
        """Store a trajectory, match it with earlier feedback, and start the reward functions.

        Raises:
            InvalidEvent: the trajectory was ingested and breaks a rule of ingestion, a turn belongs to another
                trajectory, or another tenant has a trajectory with this id.
        """
        await check_ingested(trajectory, handling.received, self.known_models)
        tx, now = handling.tx, handling.now
        offset, partition = handling.received.log_offset, handling.received.record.partition
        row = await store.add_trajectory(tx, now, trajectory, offset, partition, self.settings.reward_wait_s)
        if row is None:
            return []
        value = handling.received.record.value
        if value is not None and handling.received.envelope.dataref is None:  # what lies in the blob store is large
            self.cache.add(trajectory, len(value))
        name = trajectory.trajectory_id
        entries = await ledger.read(tx, {name: trajectory.tenant})
        score = TrajectoryScore(trajectory, row, entries[name])
        matched = (await ledger.feedback_for(tx, [trajectory], is_new=True))[name]
        events = await self._match(tx, now, score, matched.feedback_set)
        await self.scoring.add(tx, now, trajectory, matched.feedback_set, first=True)
        events += await self.scores.emit_if_ready(tx, now, [score], self.scoring.policy)
        return [*events, *await self._feedback_changed(tx, now, matched.displaced)]

    async def on_feedback(self, feedback: Feedback, handling: Handling) -> Sequence[Event]:
        """Store feedback for trajectories that come later, and apply it to the stored trajectories that it is about.

        Raises:
            InvalidEvent: a value is outside the declared range of its source.
        """
        for source, value in values_of(feedback, self.settings.labels):
            self._check_range(source, value)
        tx, now, partition = handling.tx, handling.now, handling.received.record.partition
        after = handling.received.envelope.after or {}
        placed = PlacedFeedback(feedback, handling.received.log_offset, after.get("turns"), after.get("trajectories"))
        await store.add_feedback(tx, now, handling.received.identity, placed, partition)
        if feedback.level == "task":
            assert feedback.task_id is not None
            await rematches.add_task(tx, feedback.tenant, feedback.task_id, partition)
            return []
        return await self._feedback_changed(tx, now, await ledger.targets_of(tx, placed))

    async def rematch(self, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        """Match a bounded number of trajectories with their feedback again (`rematches.take`)."""
        names, has_more = await rematches.take(tx, _REMATCHED_AT_ONCE_MAX)
        change, fail = partial(self._feedback_changed, tx, now), partial(store.fail_scoring, tx)
        events = await process_batch(tx, "scorer.rematch", names, change, fail)
        return Unfinished(events) if has_more else events

    async def on_reward(self, reward: Reward, handling: Handling) -> Sequence[Event]:
        """Add a reward from the bus to the ledger.

        `headrace_runtime.kafka.wire` has refused rewards whose source is reserved for another service.

        Raises:
            InvalidEvent: the trajectory has too many sources, or the value is outside the declared range of its source.
        """
        if not await ledger.insert_received(handling.tx, handling.now, reward):
            return []
        self._check_range(reward.source, reward.value)
        score = (await self.scores.open(handling.tx, [reward.trajectory_id])).get(reward.trajectory_id)
        if score is None or score.trajectory.tenant != reward.tenant:
            return []
        if owner_of(reward.source) is None and len(score.entries.open_sources) > SOURCES_MAX:
            limit = SOURCES_MAX
            raise InvalidEvent(
                "too_many_sources",
                f"source = {reward.source!r}: the trajectory already has rewards of {limit} sources "
                "(scorer.sources_max)",
            )
        return await self.scores.emit_if_ready(handling.tx, handling.now, [score], self.scoring.policy)

    def _check_range(self, source: str, value: float | None) -> None:
        violation = self.settings.violation(source, value)
        if violation is not None:
            raise InvalidEvent("out_of_range", violation)

    async def _feedback_changed(self, tx: AsyncConnection, now: datetime, trajectory_ids: Sequence[str]) -> list[Event]:
        """Match stored trajectories with their feedback again, and return the events that follow from the changes."""
        scores = await self.scores.open(tx, trajectory_ids)
        if not scores:
            return []
        events: list[Event] = []
        matched = await ledger.feedback_for(tx, [score.trajectory for score in scores.values()])
        for name, score in scores.items():
            before, feedback_set = score.row["inputs"], matched[name].feedback_set
            events += await self._match(tx, now, score, feedback_set)
            if score.row["inputs"] != before:
                await self.scoring.add(tx, now, score.trajectory, feedback_set, first=False)
            await asyncio.sleep(0)  # one feedback may be about many trajectories
        return [*events, *await self.scores.emit_if_ready(tx, now, scores.values(), self.scoring.policy)]

    async def _match(
        self, tx: AsyncConnection, now: datetime, score: TrajectoryScore, feedback_set: FeedbackSet
    ) -> list[Event]:
        trajectory = score.trajectory
        score.change(
            inputs=self.scoring.inputs(feedback_set),
            task_id=feedback_set.resolve_id("task_id", trajectory.task_id),
            run_id=feedback_set.resolve_id("run_id", trajectory.run_id),
            parts=max(trajectory.parts, feedback_set.session_count),
        )
        learned = self.settings.learned
        if learned.model is not None and trajectory.purpose == "train":
            answers = store.branch_answers(trajectory)
            values = thumbs_of(feedback_set, answers, self.settings.labels, learned.teachers)
            await store_thumbs(tx, now, learned.source, trajectory.trajectory_id, trajectory.tenant, values)
        return [*ledger.revise_entries(now, trajectory, feedback_set, score.entries, self.settings)]
