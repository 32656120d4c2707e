"""Finds idle runs. They end like others: once all turns that were sent until now are processed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import RowMapping, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector.closing import find_open_runs, load_session
from headrace_collector.ends import End, store_ends
from headrace_collector.schema import sessions
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.isolation import each
from headrace_runtime.stream.processor import Unfinished
from headrace_schemas import Event

_AT_ONCE_MAX = 50


async def end_idle_runs(
    tx: AsyncConnection, now: datetime, settings: CollectorSettings, started: datetime, turns_end: Mapping[int, int]
) -> Sequence[Event]:
    """Store an end for each idle run, and return no events.

    `turns_end` has the end offsets of `turns`, read before `tx` began. No run is idle before `idle_s` after the start:
    turns that were sent while this service was away must arrive first.
    """
    idle = timedelta(seconds=settings.idle_s)
    if now < started + idle:
        return []
    since_ms = epoch_ms(now - idle)
    due_sessions = select(sessions).where(sessions.c.check_ms <= epoch_ms(now)).order_by(sessions.c.check_ms)
    rows = (await tx.execute(due_sessions.limit(_AT_ONCE_MAX).with_for_update(skip_locked=True))).mappings().all()

    async def examine(row: RowMapping) -> list[Event]:
        last_seen = [row["seen_ms"]]
        if row["seen_ms"] > since_ms:  # another run of the session may be idle all the same
            runs = await find_open_runs(tx, settings, *await load_session(tx, now, settings, row))
            last_seen = [run.seen_ms for run in runs]
        if min(last_seen) <= since_ms:
            await store_ends(tx, now, end_of(row))
        busy = [seen_ms for seen_ms in last_seen if seen_ms > since_ms]
        await schedule_check(row, min(busy, default=epoch_ms(now)) + epoch_ms(now) - since_ms)
        return []

    async def end_unread(row: RowMapping, _reason: str) -> list[Event]:
        """End a session that cannot be read as if it were idle; its turns are dead-lettered then."""
        await store_ends(tx, now, end_of(row))
        await schedule_check(row, epoch_ms(now) + epoch_ms(now) - since_ms)
        return []

    def end_of(row: RowMapping) -> End:
        until = turns_end.get(row["partition"], 0)
        return End(row["tenant"], row["session_key"], row["partition"], "idle", until, unseen_since_ms=since_ms)

    async def schedule_check(row: RowMapping, check_ms: int) -> None:
        await tx.execute(update(sessions).where(sessions.c.session_key == row["session_key"]).values(check_ms=check_ms))

    await each(tx, "collector.idle", rows, examine, end_unread)
    return Unfinished() if len(rows) == _AT_ONCE_MAX else []
