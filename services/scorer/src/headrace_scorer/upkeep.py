"""Periodic work of the scorer: end the wait for rewards, delete old rows, set gauges."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.isolation import process_batch
from headrace_runtime.storage.tables import COUNTED_MAX, count_rows
from headrace_runtime.stream.processor import Unfinished
from headrace_schemas import Event
from headrace_scorer import judge_monitor, metrics, store
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


async def emit_overdue(tx: AsyncConnection, now: datetime, scores: ScoreStore, policy: RewardPolicy) -> Sequence[Event]:
    """Emit the experiences of trajectories whose wait for rewards is over, with the rewards that have arrived."""
    overdue = select(trajectories.c.trajectory_id).where(trajectories.c.settle_ms <= epoch_ms(now))
    oldest = overdue.order_by(trajectories.c.settle_ms).limit(_ENDED_AT_ONCE_MAX)
    trajectory_ids = (await tx.execute(oldest)).scalars().all()

    async def end(ended_ids: Sequence[str]) -> Sequence[Event]:
        return await scores.emit_if_ready(tx, now, (await scores.open(tx, ended_ids)).values(), policy)

    fail = partial(store.fail_scoring, tx)
    experiences = await process_batch(tx, "scorer.end_waiting", trajectory_ids, end, fail)
    return Unfinished(experiences) if len(trajectory_ids) == _ENDED_AT_ONCE_MAX else experiences


async def delete_old_trajectories(tx: AsyncConnection, now: datetime, retention_s: float) -> Sequence[Event]:
    """Delete trajectories older than `retention_s` seconds with all their rows.

    Later feedback cannot change their experiences.
    """
    horizon = _horizon(now, retention_s)
    arrived = trajectories.c.arrived_ms
    old = select(trajectories.c.trajectory_id).where(arrived <= horizon).order_by(arrived).limit(_FORGOTTEN_AT_ONCE_MAX)
    names = (await tx.execute(old)).scalars().all()
    for table in (trajectories, turns, turn_owners, ledger, run_features, thumbs, agreement_pairs):
        if names:
            await tx.execute(delete(table).where(table.c.trajectory_id.in_(names)))
    return Unfinished() if len(names) == _FORGOTTEN_AT_ONCE_MAX else []


async def delete_old_feedback(tx: AsyncConnection, now: datetime, retention_s: float) -> Sequence[Event]:
    """Delete feedback that is older than `retention_s` seconds."""
    horizon = _horizon(now, retention_s)
    arrived = feedback.c.arrived_ms
    stale = select(feedback.c.event_id).where(arrived <= horizon).order_by(arrived).limit(_FORGOTTEN_AT_ONCE_MAX)
    events = (await tx.execute(stale)).scalars().all()
    for table in (feedback, listed):
        if events:
            await tx.execute(delete(table).where(table.c.event_id.in_(events)))
    return Unfinished() if len(events) == _FORGOTTEN_AT_ONCE_MAX else []


async def delete_stray_entries(tx: AsyncConnection, now: datetime, retention_s: float) -> Sequence[Event]:
    """Delete rewards that arrived more than `retention_s` seconds ago for trajectories that never arrived.

    An entry whose trajectory is stored is deleted together with the trajectory.
    """
    horizon = _horizon(now, retention_s)
    entry = ledger.c.arrived_ms
    oldest = select(ledger.c.trajectory_id).where(entry <= horizon).order_by(entry).limit(_FORGOTTEN_AT_ONCE_MAX)
    named = set((await tx.execute(oldest)).scalars())
    if not named:
        return []
    stored = select(trajectories.c.trajectory_id).where(trajectories.c.trajectory_id.in_(named))
    strays = named - set((await tx.execute(stored)).scalars())
    if strays:
        old = ledger.c.trajectory_id.in_(strays) & (entry <= horizon)
        await tx.execute(delete(ledger).where(old))
    return Unfinished() if strays else []


FORGETTING = (delete_old_trajectories, delete_old_feedback, delete_stray_entries)
"""Deletions. Each runs in a transaction of its own, so that other transactions do not wait long."""


def _horizon(now: datetime, retention_s: float) -> int:
    return epoch_ms(now - timedelta(seconds=retention_s))


async def measure(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
    """Set the gauges of waiting trajectories and of the agreement of judges."""
    waiting = trajectories.c.settle_ms.is_not(None)
    metrics.WAITING.set(await count_rows(tx, waiting, trajectories, COUNTED_MAX))
    await judge_monitor.measure(tx, now)
    return []
