"""What became of sessions: followed on the bus from turn to trajectory to the trainer's outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from headrace.errors import Unreachable
from headrace.stack import Stack
from headrace.stack.following import Follower
from headrace.topics import Topics, connected
from headrace_schemas import Experience, TrainingMetrics, Trajectory, Turn, ids

_POLL_S = 0.2
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """`trained` and `dropped` count experiences; a session that made no call has none. `version` is the newest one
    that was made of them, None where training goes on before there is one."""

    trained: int = 0
    dropped: tuple[str, ...] = ()
    version: str | None = None
    account: int = -1
    """Of the trainer's accounts the one that said the last of it."""
    trajectory: Trajectory | None = None


class OutcomeWatch:
    """Follows everything from its beginning on; `forget` what is not asked for any more."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._follow = Follower(Turn.topic, Trajectory.topic, TrainingMetrics.topic)
        self._began = False
        self._spoken: set[str] = set()
        self._trajectories: dict[str, dict[str, Trajectory]] = {}
        self._fates: dict[str, tuple[str, int]] = {}
        """Experience id to the reason why it was dropped (empty: trained) and the account that said so."""
        self._versions: dict[int, str] = {}
        self.metrics: dict[str, float] = {}
        """Of the newest step."""

    async def begin(self) -> None:
        """Sessions that begin after this are seen. Calling it again does nothing."""
        if not self._began:
            async with connected(self._stack.bus) as topics:
                await self._follow.begin(topics)
            self._began = True

    async def until_known(self, sessions: Collection[str], timeout_s: float) -> dict[str, SessionOutcome]:
        """Returns once the trainer has said of each session what became of it. Raises `Unreachable` when that takes
        longer: it never returns on time alone."""
        deadline = time.monotonic() + timeout_s
        async with connected(self._stack.bus) as topics:
            while True:
                await self._read(topics)
                found = {session: self._outcome(session) for session in sessions}
                known = {session: one for session, one in found.items() if one is not None}
                if len(known) == len(found):
                    return known
                if time.monotonic() > deadline:
                    raise Unreachable(self._late(found, timeout_s))
                await asyncio.sleep(_POLL_S)

    async def until_closed(self, session: str, timeout_s: float) -> Trajectory | None:
        """The trajectory of a session that has ended; None when it made no call."""
        deadline = time.monotonic() + timeout_s
        async with connected(self._stack.bus) as topics:
            while True:
                await self._read(topics)
                found = self._trajectories.get(session, {})
                if found or self._key(session) not in self._spoken:
                    return next(reversed(found.values()), None)
                if time.monotonic() > deadline:
                    raise Unreachable(f"session {session} is not closed after {timeout_s:g} s; `headrace status`")
                await asyncio.sleep(_POLL_S)

    def forget(self, sessions: Collection[str]) -> None:
        for session in sessions:
            self._spoken.discard(self._key(session))
            for one in self._trajectories.pop(session, {}).values():
                for branch in range(len(one.branches)):
                    self._fates.pop(Experience.id_of(one.trajectory_id, branch), None)

    async def _read(self, topics: Topics) -> None:
        async for key in self._follow.keys(topics, Turn.topic):
            self._spoken.add(key)
        async for trajectory in self._follow.events(topics, Trajectory):
            self._trajectories.setdefault(trajectory.session_id, {})[trajectory.trajectory_id] = trajectory
        async for event in self._follow.events(topics, TrainingMetrics):
            if event.model == self._stack.model:
                self._account(event)

    def _account(self, event: TrainingMetrics) -> None:
        self.metrics = dict(event.metrics) or self.metrics
        if event.version is not None:
            self._versions[event.account] = event.version
        for one in event.verdicts:
            self._fates[one.experience_id] = (one.dropped or "", event.account)
        for undone in event.undone:
            if undone.queued:
                self._fates.pop(undone.experience_id, None)
            else:
                self._fates[undone.experience_id] = ("undone", event.account)
        for restored in event.restored:
            self._fates[restored.experience_id] = ("", event.account)

    def _outcome(self, session: str) -> SessionOutcome | None:
        """None while something of it is not decided."""
        if self._key(session) not in self._spoken:
            return SessionOutcome()
        closed = self._trajectories.get(session)
        if not closed:
            return None
        reasons, account, last = [], -1, None
        for last in closed.values():
            if last.untrained is not None or not last.branches:
                reasons.append(last.untrained or next((one.why for one in last.left_out), "empty"))
            for branch in range(0 if last.untrained else len(last.branches)):
                fate = self._fates.get(Experience.id_of(last.trajectory_id, branch))
                if fate is None:
                    return None
                reasons.append(fate[0])
                account = max(account, fate[1])
        dropped = tuple(reason for reason in reasons if reason)
        return SessionOutcome(len(reasons) - len(dropped), dropped, self._versions.get(account), account, last)

    def _late(self, found: dict[str, SessionOutcome | None], timeout_s: float) -> str:
        late = [session for session, one in found.items() if one is None]
        shown = ", ".join(late[:_NAMED_MAX]) + (", ..." if len(late) > _NAMED_MAX else "")
        open_ = sum(session not in self._trajectories for session in late)
        return (
            f"{len(late)} of {len(found)} sessions have no training outcome after {timeout_s:g} s ({shown}); {open_} "
            "of them are not closed. `headrace status` and the trainer's log say what they wait for"
        )

    def _key(self, session: str) -> str:
        return ids.session_key(self._stack.tenant, session)
