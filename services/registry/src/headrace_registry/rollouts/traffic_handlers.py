"""Handlers of live traffic: turns enroll units, and events about their sessions are stored until the units are
closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.leader import LeaderLease
from headrace_registry.metrics import UNITS_FULL
from headrace_registry.rollouts import rollout_store, unit_store
from headrace_registry.rollouts.unit_store import Membership
from headrace_registry.shadow.sampling import PromptSampler
from headrace_runtime.stream.processor import Handling
from headrace_schemas import Event, Feedback, Reward, Trajectory, Turn


class TurnHandler:
    """Enrolls a unit with its first turn in an arm, and counts turns by the version that answered.

    A unit belongs to the arm that it was assigned to, whichever version answered. Call `write_counts` after each batch,
    in its transaction.
    """

    def __init__(self, lease: LeaderLease, events_max: int, sampler: PromptSampler | None = None) -> None:
        self._lease = lease
        self._events_max = events_max
        self._sampler = sampler
        self._counting: AsyncConnection | None = None
        """The transaction that the counts belong to. If it was rolled back, the turns are counted again."""
        self._drawn: Counter[str] = Counter()
        self._answered: Counter[tuple[str, str]] = Counter()

    async def __call__(self, event: Turn, handling: Handling) -> Sequence[Event]:
        if self._sampler is not None:
            await self._sampler.sample(handling.tx, event)
        assigned = event.assignment
        if assigned is None:
            return ()
        self._count(event, handling.tx)
        if assigned.arm == "rest":
            return ()
        await self._lease.check(handling.tx)
        for rollout_id in assigned.rollouts:
            rollout = await rollout_store.load_rollout(handling.tx, rollout_id)
            if rollout is None or not rollout.is_under_way:
                continue
            member = Membership(rollout_id, assigned.unit, rollout.observed_ms)
            window_ms = round(rollout.plan.window_s * 1000)
            candidate = assigned.arm == "candidate"
            if await unit_store.enroll(
                handling.tx, member, event.session_key, event.tenant, candidate=candidate, window_ms=window_ms
            ) and not await unit_store.add_event(handling.tx, member, event, self._events_max):
                UNITS_FULL.inc()
        return ()

    def _count(self, event: Turn, tx: AsyncConnection) -> None:
        if self._counting is not tx:
            self._counting = tx
            self._drawn.clear()
            self._answered.clear()
        self._drawn[event.model] += 1
        self._answered[event.model, event.version] += 1

    async def write_counts(self, tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        if self._counting is tx:
            self._counting = None
            await self._lease.check(tx)
            await unit_store.count_turns(tx, self._drawn, self._answered)
        return ()


class SessionEventHandler:
    """Stores a reward, feedback or trajectory of a session in an arm. Events of other sessions are not stored."""

    def __init__(self, lease: LeaderLease, events_max: int) -> None:
        self._lease = lease
        self._events_max = events_max

    async def __call__(self, event: Reward | Feedback | Trajectory, handling: Handling) -> Sequence[Event]:
        members = await unit_store.memberships(handling.tx, event.session_key, event.tenant)
        if not members:
            return ()
        await self._lease.check(handling.tx)
        for member in members:
            if not await unit_store.add_event(handling.tx, member, event, self._events_max):
                UNITS_FULL.inc()
        return ()
