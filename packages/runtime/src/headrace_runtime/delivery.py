"""Deduplication of events and dead letters, and stored positions, for effects that happen once.

All functions run in the caller's transaction, which also contains the effects.
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


async def select_new_letters(
    tx: AsyncConnection, tables: StreamTables, letters: Sequence[DeadLetter], now: datetime
) -> list[DeadLetter]:
    """Return the letters that were not written before. A record has one letter, because its offset is in the id."""
    by_id = {letter.event_id: letter for letter in letters}
    return [by_id[name] for name in await _mark_new(tx, tables, by_id, now)]


async def select_new_events(
    tx: AsyncConnection, tables: StreamTables, received: Sequence[Received], now: datetime
) -> list[Received]:
    """Return the events whose ids are new for their tenants, each id once, and mark the ids as seen."""
    with_ids = [(item.identity, item) for item in received]
    first = dict(reversed(with_ids))
    new_ids = set(await _mark_new(tx, tables, dict(with_ids), now))
    new_events = [item for name, item in with_ids if item is first[name] and name in new_ids]
    new_objects = {id(item) for item in new_events}
    for item in received:
        EVENTS_HANDLED.labels(item.record.topic, "handled" if id(item) in new_objects else "duplicate").inc()
    return new_events


async def _mark_new(
    tx: AsyncConnection, tables: StreamTables, names: dict[str, DeadLetter] | dict[str, Received], now: datetime
) -> list[str]:
    """Mark ids as seen, and return those that are new, in order."""
    if not names:
        return []
    table = tables.seen
    seen = set((await tx.execute(select(table.c.event_id).where(table.c.event_id.in_(names)))).scalars())
    new = [name for name in names if name not in seen]
    if new:
        at_ms = epoch_ms(now)
        await tx.execute(insert(table), [{"event_id": name, "at_ms": at_ms} for name in new])
    return new


async def store_positions(tx: AsyncConnection, tables: StreamTables, records: Sequence[Record]) -> None:
    """Store the positions after `records`, whose effects are in this database."""
    next_offsets: dict[tuple[str, int], int] = {}
    for record in records:
        key = (record.topic, record.partition)
        next_offsets[key] = max(next_offsets.get(key, 0), record.offset + 1)
    for (topic, partition), offset in next_offsets.items():
        await upsert(tx, tables.positions, {"topic": topic, "partition": partition}, {"next_offset": offset})


async def position(tx: AsyncConnection, tables: StreamTables, topic: str) -> dict[int, int]:
    """Return the next offset of each partition of `topic`, up to which the effects are in this database."""
    table = tables.positions
    rows = await tx.execute(select(table.c.partition, table.c.next_offset).where(table.c.topic == topic))
    return {row.partition: row.next_offset for row in rows}
