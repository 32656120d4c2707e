"""At-least-once delivery, once in effect: which events and dead letters are new, and how far each partition is read.

Every function runs in its caller's transaction, that of the effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.metrics import EVENTS_HANDLED
from headrace_runtime.stream_tables import StreamTables
from headrace_runtime.upsert import upsert
from headrace_runtime.wire import Received, Record
from headrace_schemas import DeadLetter


async def new_letters(
    tx: AsyncConnection, tables: StreamTables, letters: Sequence[DeadLetter], now: datetime
) -> list[DeadLetter]:
    """Return the letters that were not written before. Each record has one: its place is in the letter's id."""
    by_id = {letter.event_id: letter for letter in letters}
    return [by_id[name] for name in await _mark_new(tx, tables, by_id, now)]


async def unseen(
    tx: AsyncConnection, tables: StreamTables, received: Sequence[Received], now: datetime
) -> list[Received]:
    """Return the events whose id is new to their tenant, each id once, and mark the ids as seen."""
    named = [(item.identity, item) for item in received]
    first = dict(reversed(named))
    new = set(await _mark_new(tx, tables, dict(named), now))
    fresh = [item for name, item in named if item is first[name] and name in new]
    kept = {id(item) for item in fresh}
    for item in received:
        EVENTS_HANDLED.labels(item.record.topic, "handled" if id(item) in kept else "duplicate").inc()
    return fresh


async def _mark_new(
    tx: AsyncConnection, tables: StreamTables, names: dict[str, DeadLetter] | dict[str, Received], now: datetime
) -> list[str]:
    """Mark ids as seen, and return those that were not, in order."""
    if not names:
        return []
    table = tables.seen
    seen = set((await tx.execute(select(table.c.event_id).where(table.c.event_id.in_(names)))).scalars())
    new = [name for name in names if name not in seen]
    if new:
        at_ms = epoch_ms(now)
        await tx.execute(insert(table), [{"event_id": name, "at_ms": at_ms} for name in new])
    return new


async def advance(tx: AsyncConnection, tables: StreamTables, records: Sequence[Record]) -> None:
    """Store that the effects of `records` are in this database."""
    reached: dict[tuple[str, int], int] = {}
    for record in records:
        place = (record.topic, record.partition)
        reached[place] = max(reached.get(place, 0), record.offset + 1)
    for (topic, partition), offset in reached.items():
        await upsert(tx, tables.positions, {"topic": topic, "partition": partition}, {"next_offset": offset})


async def position(tx: AsyncConnection, tables: StreamTables, topic: str) -> dict[int, int]:
    """Return how far the effects in this database reach: the next offset of each partition of `topic`."""
    table = tables.positions
    rows = await tx.execute(select(table.c.partition, table.c.next_offset).where(table.c.topic == topic))
    return {row.partition: row.next_offset for row in rows}
