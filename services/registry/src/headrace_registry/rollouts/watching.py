"""Live traffic: turns enrol units, and what is said about their sessions is kept until they are closed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_registry.leader import LeaderLease
from headrace_registry.metrics import UNITS_FULL
from headrace_registry.rollouts import kept, ledger
from headrace_registry.rollouts.ledger import Membership
from headrace_registry.shadow.sampling import PromptSampler
from headrace_runtime.processor import Handling
from headrace_schemas import Event, Feedback, Reward, Trajectory, Turn


class TurnHandler:
    """A unit begins with the first turn of an arm, whichever version answered: arms are compared as assigned."""

    def __init__(self, lease: LeaderLease, events_max: int, sampler: PromptSampler) -> None:
        self._lease = lease
        self._events_max = events_max
        self._sampler = sampler

    async def __call__(self, event: Turn, handling: Handling) -> Sequence[Event]:
        await self._sampler.take(handling.tx, event)
        assigned = event.assignment
        if assigned is None or assigned.arm == "rest":
            return ()
        await self._lease.check(handling.tx)
        for rollout_id in assigned.rollouts:
            rollout = await kept.one(handling.tx, rollout_id)
            if rollout is None or not rollout.going_on:
                continue
            member = Membership(rollout_id, assigned.unit, rollout.observed_ms)
            window_ms = round(rollout.plan.window_s * 1000)
            candidate = assigned.arm == "candidate"
            if await ledger.enroll(
                handling.tx, member, event.session_key, candidate=candidate, window_ms=window_ms
            ) and not await ledger.keep(handling.tx, member, event, self._events_max):
                UNITS_FULL.inc()
        return ()


class WordHandler:
    """A reward, a feedback or a trajectory of a session. Of sessions in no arm nothing is kept."""

    def __init__(self, lease: LeaderLease, events_max: int) -> None:
        self._lease = lease
        self._events_max = events_max

    async def __call__(self, event: Reward | Feedback | Trajectory, handling: Handling) -> Sequence[Event]:
        members = await ledger.memberships(handling.tx, event.session_key)
        if not members:
            return ()
        await self._lease.check(handling.tx)
        for member in members:
            if not await ledger.keep(handling.tx, member, event, self._events_max):
                UNITS_FULL.inc()
        return ()
