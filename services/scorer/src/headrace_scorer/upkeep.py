"""Periodic work: end waiting, delete what is old, measure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.isolation import each
from headrace_runtime.processor import Unfinished
from headrace_runtime.sweeping import COUNTED_MAX, count_rows
from headrace_schemas import Event
from headrace_scorer import judge_watch, metrics, store
from headrace_scorer.reward_policy import RewardPolicy
from headrace_scorer.schema import (
    agreement_pairs,
    feedback,
    ledger,
    listed,
    run_features,
    thumbs,
    trajectories,
    turn_owners,
    turns,
)
from headrace_scorer.scores import ScoreStore

_ENDED_AT_ONCE_MAX = 25
_FORGOTTEN_AT_ONCE_MAX = 5


async def end_waiting(tx: AsyncConnection, now: datetime, scores: ScoreStore, policy: RewardPolicy) -> Sequence[Event]:
    """Emit experiences of trajectories whose wait is over, with the rewards that are there."""
    due = select(trajectories.c.trajectory_id).where(trajectories.c.settle_ms <= epoch_ms(now))
    found = (await tx.execute(due.order_by(trajectories.c.settle_ms).limit(_ENDED_AT_ONCE_MAX))).scalars().all()

    async def end(trajectory_id: str) -> Sequence[Event]:
        score = await scores.open(tx, trajectory_id)
        return [] if score is None else await scores.emit_if_ready(tx, now, score, policy)

    experiences = await each(tx, "scorer.end_waiting", found, end, partial(store.fail_scoring, tx))
    return Unfinished(experiences) if len(found) == _ENDED_AT_ONCE_MAX else experiences


async def forget_trajectories(tx: AsyncConnection, now: datetime, retention_s: float) -> Sequence[Event]:
    """Delete what is older than `retention_s`, some at a time. It cannot be revised after that."""
    horizon = _horizon(now, retention_s)
    arrived = trajectories.c.arrived_ms
    old = select(trajectories.c.trajectory_id).where(arrived <= horizon).order_by(arrived).limit(_FORGOTTEN_AT_ONCE_MAX)
    names = (await tx.execute(old)).scalars().all()
    for table in (trajectories, turns, turn_owners, ledger, run_features, thumbs, agreement_pairs):
        if names:
            await tx.execute(delete(table).where(table.c.trajectory_id.in_(names)))
    return Unfinished() if len(names) == _FORGOTTEN_AT_ONCE_MAX else []


async def forget_feedback(tx: AsyncConnection, now: datetime, retention_s: float) -> Sequence[Event]:
    """As `forget_trajectories`, of feedback."""
    horizon = _horizon(now, retention_s)
    said = feedback.c.arrived_ms
    stale = select(feedback.c.event_id).where(said <= horizon).order_by(said).limit(_FORGOTTEN_AT_ONCE_MAX)
    events = (await tx.execute(stale)).scalars().all()
    for table in (feedback, listed):
        if events:
            await tx.execute(delete(table).where(table.c.event_id.in_(events)))
    return Unfinished() if len(events) == _FORGOTTEN_AT_ONCE_MAX else []


async def forget_strays(tx: AsyncConnection, now: datetime, retention_s: float) -> Sequence[Event]:
    """As `forget_trajectories`, of the oldest ledger entries about trajectories that are not known. An entry that is
    older than its trajectory is deleted together with the trajectory."""
    horizon = _horizon(now, retention_s)
    entry = ledger.c.arrived_ms
    oldest = select(ledger.c.trajectory_id).where(entry <= horizon).order_by(entry).limit(_FORGOTTEN_AT_ONCE_MAX)
    named = set((await tx.execute(oldest)).scalars())
    if not named:
        return []
    known = select(trajectories.c.trajectory_id).where(trajectories.c.trajectory_id.in_(named))
    strays = named - set((await tx.execute(known)).scalars())
    if strays:
        old = ledger.c.trajectory_id.in_(strays) & (entry <= horizon)
        await tx.execute(delete(ledger).where(old))
    return Unfinished() if strays else []


FORGETTING = (forget_trajectories, forget_feedback, forget_strays)
"""Each in a transaction of its own, so that nothing else waits long for any of them."""


def _horizon(now: datetime, retention_s: float) -> int:
    return epoch_ms(now - timedelta(seconds=retention_s))


async def measure(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
    waiting = trajectories.c.settle_ms.is_not(None)
    metrics.WAITING.set(await count_rows(tx, waiting, trajectories, COUNTED_MAX))
    await judge_watch.measure(tx, now)
    return []
