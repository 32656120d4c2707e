"""Training outcomes of sessions, followed on the bus from turn to trajectory to the trainer's report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from headrace.errors import Unreachable
from headrace.following import Follower
from headrace.topics import Topics, connected
from headrace_integrations.stack import Stack
from headrace_schemas import Experience, TrainingMetrics, Trajectory, Turn
from headrace_schemas.values import ids

_POLL_S = 0.2
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """Training outcome of a session. A session without calls has no experiences.

    Attributes:
        trained: number of trained experiences.
        dropped: reason for each dropped experience.
        version: newest version that was trained on the session, or None if training continues before the next version.
        account: number of the newest trainer report about the session.
    """

    trained: int = 0
    dropped: tuple[str, ...] = ()
    version: str | None = None
    account: int = -1
    """Number of the trainer report with the newest outcome of the session."""
    trajectory: Trajectory | None = None


class OutcomeWatch:
    """Reader of turns, trajectories and training reports from the beginning of the topics. Callers `forget` sessions
    they no longer need."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._follow = Follower(Turn.topic, Trajectory.topic, TrainingMetrics.topic)
        self._has_begun = False
        self._keys_with_turns: set[str] = set()
        self._trajectories: dict[str, dict[str, Trajectory]] = {}
        self._outcomes: dict[str, tuple[str, int]] = {}
        """Reason for dropping (empty if trained) and number of the trainer report, by experience id."""
        self._versions: dict[int, str] = {}
        self.metrics: dict[str, float] = {}
        """Metrics of the newest step."""

    async def begin(self) -> None:
        """Skip everything that is on the topics now, so that only later sessions are seen. Repeated calls have no
        effect."""
        if not self._has_begun:
            async with connected(self._stack.bus) as topics:
                await self._follow.begin(topics)
            self._has_begun = True

    async def until_known(self, sessions: Collection[str], timeout_s: float) -> dict[str, SessionOutcome]:
        """Wait until the trainer has reported the outcome of each session and return the outcomes.

        Raises:
            Unreachable: an outcome is missing after `timeout_s`. Incomplete outcomes are never returned.
        """
        deadline = time.monotonic() + timeout_s
        async with connected(self._stack.bus) as topics:
            while True:
                await self._read(topics)
                outcomes = {session: self._outcome(session) for session in sessions}
                decided = {session: outcome for session, outcome in outcomes.items() if outcome is not None}
                if len(decided) == len(outcomes):
                    return decided
                if time.monotonic() > deadline:
                    raise Unreachable(self._timeout_message(outcomes, timeout_s))
                await asyncio.sleep(_POLL_S)

    async def until_closed(self, session: str, timeout_s: float) -> Trajectory | None:
        """Return the trajectory of an ended session, or None if it made no call."""
        deadline = time.monotonic() + timeout_s
        async with connected(self._stack.bus) as topics:
            while True:
                await self._read(topics)
                trajectories = self._trajectories.get(session, {})
                if trajectories or self._key(session) not in self._keys_with_turns:
                    return next(reversed(trajectories.values()), None)
                if time.monotonic() > deadline:
                    raise Unreachable(f"session {session} is not closed after {timeout_s:g} s; see `headrace status`")
                await asyncio.sleep(_POLL_S)

    def forget(self, sessions: Collection[str]) -> None:
        """Remove the state of sessions that the caller no longer needs, so that memory stays bounded."""
        for session in sessions:
            self._keys_with_turns.discard(self._key(session))
            for trajectory in self._trajectories.pop(session, {}).values():
                for branch in range(len(trajectory.branches)):
                    self._outcomes.pop(Experience.id_of(trajectory.trajectory_id, branch), None)

    async def _read(self, topics: Topics) -> None:
        async for key in self._follow.keys(topics, Turn.topic):
            self._keys_with_turns.add(key)
        async for trajectory in self._follow.events(topics, Trajectory):
            self._trajectories.setdefault(trajectory.session_id, {})[trajectory.trajectory_id] = trajectory
        async for event in self._follow.events(topics, TrainingMetrics):
            if event.model == self._stack.model:
                self._account(event)

    def _account(self, event: TrainingMetrics) -> None:
        self.metrics = dict(event.metrics) or self.metrics
        if event.version is not None:
            self._versions[event.account] = event.version
        for outcome in event.verdicts:
            self._outcomes[outcome.experience_id] = (outcome.dropped or "", event.account)
        for undone in event.undone:
            if undone.queued:
                self._outcomes.pop(undone.experience_id, None)
            else:
                self._outcomes[undone.experience_id] = ("undone", event.account)
        for restored in event.restored:
            self._outcomes[restored.experience_id] = ("", event.account)

    def _outcome(self, session: str) -> SessionOutcome | None:
        """Return the outcome of a session, or None while an experience of it is undecided."""
        if self._key(session) not in self._keys_with_turns:
            return SessionOutcome()
        closed = self._trajectories.get(session)
        if not closed:
            return None
        reasons, account, last = [], -1, None
        for last in closed.values():
            if last.untrained is not None or not last.branches:
                reasons.append(last.untrained or next((turn.full_reason for turn in last.left_out), "empty"))
            for branch in range(0 if last.untrained else len(last.branches)):
                outcome = self._outcomes.get(Experience.id_of(last.trajectory_id, branch))
                if outcome is None:
                    return None
                reasons.append(outcome[0])
                account = max(account, outcome[1])
        dropped = tuple(reason for reason in reasons if reason)
        return SessionOutcome(len(reasons) - len(dropped), dropped, self._versions.get(account), account, last)

    def _timeout_message(self, outcomes: dict[str, SessionOutcome | None], timeout_s: float) -> str:
        undecided = [session for session, outcome in outcomes.items() if outcome is None]
        examples = ", ".join(undecided[:_NAMED_MAX]) + (", ..." if len(undecided) > _NAMED_MAX else "")
        open_count = sum(session not in self._trajectories for session in undecided)
        return (
            f"{len(undecided)} of {len(outcomes)} sessions have no training outcome after {timeout_s:g} s "
            f"({examples}); "
            f"{open_count} of them are not closed; see `headrace status` and the trainer's log"
        )

    def _key(self, session: str) -> str:
        return ids.session_key(self._stack.tenant, session)
