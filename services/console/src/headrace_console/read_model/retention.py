"""Deletion of sessions after their retention, the oldest first, in small transactions."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.batch import Batch
from headrace_console.read_model.rows import Names
from headrace_runtime.storage.tables import delete_batch

TURNS_MAX = 10_000_000
"""Largest number of captured turns that are stored, however long the retention: about 3 GB in SQLite."""
REWARD_DAYS = 400
"""Days for which the counts of rewards by hour are stored."""
_SESSIONS_AT_ONCE = 20
_ROWS_AT_ONCE = 200


async def delete_expired(tx: AsyncConnection, names: Names, *, day: int, retention_days: int) -> bool:
    """Delete a portion of the expired rows.

    A session expires `retention_days` after the day on which the console read the last event about it. Its turns are
    subtracted from the counts.

    Args:
        tx: the transaction.
        names: the table of texts that rows refer to by number.
        day: the current day, in days since 1970.
        retention_days: days for which sessions are stored.

    Returns:
        Whether more rows may have expired.
    """
    horizon = day - retention_days
    sessions, experiences = tables.sessions, tables.experiences
    oldest = select(sessions.c.id).order_by(sessions.c.read_day).limit(_SESSIONS_AT_ONCE)
    if await captured_turns(tx) <= TURNS_MAX:
        oldest = oldest.where(sessions.c.read_day < horizon)
    expired = (await tx.execute(oldest)).scalars().all()
    is_stub, age = experiences.c.session == 0, experiences.c.read_day
    stubs = select(experiences.c.id).where(is_stub, age < horizon).order_by(age).limit(_ROWS_AT_ONCE)
    expired_stubs = (await tx.execute(stubs)).scalars().all()
    is_complete = True
    if expired or expired_stubs:
        batch = Batch(tx, names, titles=False, day=day)
        is_complete = await batch.remove(expired, expired_stubs, _ROWS_AT_ONCE)
    oldest_hour = (day - REWARD_DAYS) * tables.DAY_MS // tables.HOUR_MS
    return any(
        [
            not is_complete,
            len(expired) == _SESSIONS_AT_ONCE,
            len(expired_stubs) == _ROWS_AT_ONCE,
            await delete_batch(tx, tables.refusals, tables.refusals.c.read_day < horizon, limit=_ROWS_AT_ONCE),
            await delete_batch(tx, tables.letters, tables.letters.c.read_day < horizon, limit=_ROWS_AT_ONCE),
            await delete_batch(tx, tables.hours, tables.hours.c.hour < oldest_hour, limit=_ROWS_AT_ONCE),
        ]
    )


async def captured_turns(tx: AsyncConnection) -> int:
    """Return the number of captured turns that are stored."""
    counts = tables.counts
    return int(await tx.scalar(select(func.sum(counts.c.turns)).where(counts.c.lineage == 0)) or 0)
