"""The scorer's handlers. Their effects depend only on the event, the tables and the loaded reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.processor import Handling
from headrace_schemas import Event, Feedback, Reward, Trajectory
from headrace_scorer import feedback_rewards, ingest_check, ledger, store
from headrace_scorer.feedback_matching import FeedbackSet, PlacedFeedback
from headrace_scorer.scores import ScoreStore, TrajectoryScore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings


@dataclass(frozen=True, slots=True)
class Scorer:
    """Handlers for the three topics."""

    settings: ScorerSettings
    cache: store.TrajectoryCache
    scores: ScoreStore
    scoring: Scoring
    known: ingest_check.Lookup = ingest_check.nothing_known

    async def on_trajectory(self, trajectory: Trajectory, handling: Handling) -> Sequence[Event]:
        """Store it, match it with feedback that came before, and start the reward functions.

        Raises `InvalidEvent` for a trajectory that must not come from outside, and for a turn of another trajectory.
        """
        await ingest_check.check(trajectory, handling.received, self.known)
        tx, now = handling.tx, handling.now
        row = await store.add_trajectory(tx, now, trajectory, handling.received.place, self.settings.reward_wait_s)
        if row is None:
            return []
        self.cache.keep(trajectory)
        score = TrajectoryScore(trajectory, row, await ledger.read(tx, trajectory.trajectory_id, trajectory.tenant))
        feedback_set, displaced = await feedback_rewards.feedback_for(tx, trajectory)
        events = await self._match(handling, score, feedback_set)
        await self.scoring.add(tx, now, trajectory, feedback_set, first=True)
        events += await self.scores.emit_if_ready(tx, now, score, self.scoring.policy)
        for other in displaced:
            events += await self._feedback_changed(handling, other)
        return events

    async def on_feedback(self, feedback: Feedback, handling: Handling) -> Sequence[Event]:
        """Store it for later trajectories, and match it with those that are here."""
        after = handling.received.envelope.after or {}
        placed = PlacedFeedback(feedback, handling.received.place, after.get("turns"), after.get("trajectories"))
        await store.add_feedback(handling.tx, handling.now, placed)
        events: list[Event] = []
        for trajectory_id in await feedback_rewards.targets_of(handling.tx, placed):
            events += await self._feedback_changed(handling, trajectory_id)
        return events

    async def on_reward(self, reward: Reward, handling: Handling) -> Sequence[Event]:
        """Enter a reward of another source. Raises `InvalidEvent` when a trajectory has too many sources."""
        if not await ledger.receive(handling.tx, handling.now, reward):
            return []
        score = await self.scores.open(handling.tx, reward.trajectory_id)
        if score is None or score.trajectory.tenant != reward.tenant:
            return []
        if len(score.entries.sources) > self.settings.sources_max:
            limit = self.settings.sources_max
            raise InvalidEvent(
                "too_many_sources",
                f"{reward.source}: a trajectory has {limit} sources at most (scorer.sources_max)",
            )
        return await self.scores.emit_if_ready(handling.tx, handling.now, score, self.scoring.policy)

    async def _feedback_changed(self, handling: Handling, trajectory_id: str) -> list[Event]:
        score = await self.scores.open(handling.tx, trajectory_id)
        if score is None:
            return []
        feedback_set, _ = await feedback_rewards.feedback_for(handling.tx, score.trajectory)
        before = score.row["inputs"]
        events = await self._match(handling, score, feedback_set)
        if score.row["inputs"] != before:
            await self.scoring.add(handling.tx, handling.now, score.trajectory, feedback_set, first=False)
        return [*events, *await self.scores.emit_if_ready(handling.tx, handling.now, score, self.scoring.policy)]

    async def _match(self, handling: Handling, score: TrajectoryScore, feedback_set: FeedbackSet) -> list[Event]:
        trajectory = score.trajectory
        score.change(
            inputs=self.scoring.inputs(feedback_set),
            task_id=feedback_set.named("task_id", trajectory.task_id),
            run_id=feedback_set.named("run_id", trajectory.run_id),
            parts=max(trajectory.parts, feedback_set.parts),
        )
        limit = self.settings.sources_max
        return [
            *await feedback_rewards.revise(handling.tx, handling.now, trajectory, feedback_set, score.entries, limit)
        ]
