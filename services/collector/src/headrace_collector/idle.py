"""Finds idle runs. They end like others: once all turns that were sent until now are processed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import RowMapping, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector.closing import known_of, runs_of
from headrace_collector.ends import End, remember
from headrace_collector.schema import sessions
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from headrace_runtime.isolation import each
from headrace_runtime.processor import Unfinished
from headrace_schemas import Event

_AT_ONCE_MAX = 50


async def find_idle(
    tx: AsyncConnection, now: datetime, settings: CollectorSettings, started: datetime, turns_end: Mapping[int, int]
) -> Sequence[Event]:
    """Remember an end for each idle run; nothing is to be published yet.

    `turns_end` is where the partitions of `turns` end, read before `tx` began. Nothing is idle before `idle_s` after
    the start: what was sent while this service was away has to arrive first.
    """
    idle = timedelta(seconds=settings.idle_s)
    if now < started + idle:
        return []
    since_ms = epoch_ms(now - idle)
    due = select(sessions).where(sessions.c.check_ms <= epoch_ms(now)).order_by(sessions.c.check_ms)
    rows = (await tx.execute(due.limit(_AT_ONCE_MAX).with_for_update(skip_locked=True))).mappings().all()

    async def look(row: RowMapping) -> list[Event]:
        last_seen = [row["seen_ms"]]
        if row["seen_ms"] > since_ms:  # another run of the session may be idle all the same
            runs = await runs_of(tx, *await known_of(tx, now, settings, row))
            last_seen = [run.seen_ms for run in runs]
        if min(last_seen) <= since_ms:
            await remember(tx, now, end_of(row))
        busy = [seen_ms for seen_ms in last_seen if seen_ms > since_ms]
        await look_again(row, min(busy, default=epoch_ms(now)) + epoch_ms(now) - since_ms)
        return []

    async def end_unread(row: RowMapping, _reason: str) -> list[Event]:
        """A session that cannot be read ends as if it were idle; then its turns are dead-lettered."""
        await remember(tx, now, end_of(row))
        await look_again(row, epoch_ms(now) + epoch_ms(now) - since_ms)
        return []

    def end_of(row: RowMapping) -> End:
        until = turns_end.get(row["partition"], 0)
        return End(row["tenant"], row["session_key"], row["partition"], "idle", until, unseen_since_ms=since_ms)

    async def look_again(row: RowMapping, check_ms: int) -> None:
        await tx.execute(update(sessions).where(sessions.c.session_key == row["session_key"]).values(check_ms=check_ms))

    await each(tx, "collector.idle", rows, look, end_unread)
    return Unfinished() if len(rows) == _AT_ONCE_MAX else []
