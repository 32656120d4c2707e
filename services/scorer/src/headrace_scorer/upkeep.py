"""What has to be done now and then: end waiting, forget, measure."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Experience
from headrace_scorer import metrics
from headrace_scorer.accounts import Book
from headrace_scorer.policy import Policy
from headrace_scorer.schema import feedback, ledger, listed, trajectories, turns

_AT_ONCE_MAX = 200


async def end_waiting(tx: AsyncConnection, now: datetime, book: Book, policy: Policy) -> list[Experience]:
    """Settle trajectories whose time has come with what there is."""
    due = select(trajectories.c.trajectory_id).where(trajectories.c.settle_ms <= epoch_ms(now))
    found = (await tx.execute(due.order_by(trajectories.c.settle_ms).limit(_AT_ONCE_MAX))).scalars().all()
    experiences = []
    for trajectory_id in found:
        account = await book.open(tx, trajectory_id)
        if account is not None:
            experiences += await book.settle(tx, now, account, policy)
    return experiences


async def forget(tx: AsyncConnection, now: datetime, retention_s: float) -> None:
    """Drop what is older than `retention_s`: nothing can revise it any more."""
    horizon = epoch_ms(now - timedelta(seconds=retention_s))
    old = select(trajectories.c.trajectory_id).where(trajectories.c.arrived_ms <= horizon).limit(_AT_ONCE_MAX)
    names = (await tx.execute(old)).scalars().all()
    for table in (trajectories, turns, ledger):
        if names:
            await tx.execute(delete(table).where(table.c.trajectory_id.in_(names)))
    known = select(trajectories.c.trajectory_id).where(trajectories.c.trajectory_id == ledger.c.trajectory_id)
    await tx.execute(delete(ledger).where(ledger.c.arrived_ms <= horizon, ~known.exists()))
    stale = select(feedback.c.event_id).where(feedback.c.arrived_ms <= horizon).limit(_AT_ONCE_MAX)
    events = (await tx.execute(stale)).scalars().all()
    for table in (feedback, listed):
        if events:
            await tx.execute(delete(table).where(table.c.event_id.in_(events)))


async def measure(tx: AsyncConnection) -> None:
    waiting = select(func.count()).where(trajectories.c.settle_ms.is_not(None))
    metrics.WAITING.set(await tx.scalar(waiting) or 0)
