"""What the scorer does with each event. Deterministic in the event, the tables and the functions that are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.processor import Handling
from headrace_schemas import Event, Feedback, Reward, Trajectory
from headrace_scorer import door, feedback_rewards, ledger, store
from headrace_scorer.accounts import Account, Book
from headrace_scorer.joins import Heard, Said
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import Settings


@dataclass(frozen=True, slots=True)
class Scorer:
    """Handlers for the three topics."""

    settings: Settings
    library: store.Library
    book: Book
    scoring: Scoring
    known: door.Lookup = door.nothing_known

    async def on_trajectory(self, trajectory: Trajectory, handling: Handling) -> Sequence[Event]:
        """Keep it, join what was said before it came, and have reward functions look at it.

        Raises `InvalidEvent` for what may not come from outside, and for a turn that another trajectory holds.
        """
        await door.check(trajectory, handling.received, self.known)
        tx, now = handling.tx, handling.now
        row = await store.add_trajectory(tx, now, trajectory, handling.received.place, self.settings.settle_s)
        if row is None:
            return []
        self.library.keep(trajectory)
        account = Account(trajectory, row, await ledger.read(tx, trajectory.trajectory_id, trajectory.tenant))
        said, displaced = await feedback_rewards.said_about(tx, trajectory)
        events = await self._join(handling, account, said)
        await self.scoring.add(tx, now, trajectory, said, first=True)
        events += await self.book.settle(tx, now, account, self.scoring.policy)
        for other in displaced:
            events += await self._feedback_changed(handling, other)
        return events

    async def on_feedback(self, feedback: Feedback, handling: Handling) -> Sequence[Event]:
        """Keep it for trajectories to come, and join it with those that are here."""
        after = handling.received.envelope.after or {}
        heard = Heard(feedback, handling.received.place, after.get("turns"), after.get("trajectories"))
        await store.add_feedback(handling.tx, handling.now, heard)
        events: list[Event] = []
        for trajectory_id in await feedback_rewards.concerned(handling.tx, heard):
            events += await self._feedback_changed(handling, trajectory_id)
        return events

    async def on_reward(self, reward: Reward, handling: Handling) -> Sequence[Event]:
        """Enter what others say. Raises `InvalidEvent` when too many sources speak about one trajectory."""
        if not await ledger.receive(handling.tx, handling.now, reward):
            return []
        account = await self.book.open(handling.tx, reward.trajectory_id)
        if account is None or account.trajectory.tenant != reward.tenant:
            return []
        if len(account.entries.sources) > self.settings.sources_max:
            limit = self.settings.sources_max
            raise InvalidEvent("too_many_sources", f"{reward.source} would be one source more than {limit}")
        return await self.book.settle(handling.tx, handling.now, account, self.scoring.policy)

    async def _feedback_changed(self, handling: Handling, trajectory_id: str) -> list[Event]:
        account = await self.book.open(handling.tx, trajectory_id)
        if account is None:
            return []
        said, _ = await feedback_rewards.said_about(handling.tx, account.trajectory)
        before = account.row["inputs"]
        events = await self._join(handling, account, said)
        if account.row["inputs"] != before:
            await self.scoring.add(handling.tx, handling.now, account.trajectory, said, first=False)
        return [*events, *await self.book.settle(handling.tx, handling.now, account, self.scoring.policy)]

    async def _join(self, handling: Handling, account: Account, said: Said) -> list[Event]:
        trajectory = account.trajectory
        account.change(
            inputs=self.scoring.inputs(said),
            task_id=said.named("task_id", trajectory.task_id),
            run_id=said.named("run_id", trajectory.run_id),
            parts=max(trajectory.parts, said.parts),
        )
        limit = self.settings.sources_max
        return [*await feedback_rewards.revise(handling.tx, handling.now, trajectory, said, account.entries, limit)]
