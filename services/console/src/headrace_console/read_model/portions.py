"""Statements and loops that work in portions, so that each blocks the event loop for at most a few milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Table
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.storage.tables import portions, upsert_statement

T = TypeVar("T")
_ITEMS_AT_ONCE = 100
"""Number of events or rows that are processed before other tasks run."""


async def with_pauses(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield events or rows, and let other tasks run after each `_ITEMS_AT_ONCE` of them."""
    for number, item in enumerate(items):
        if number % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        yield item


async def upsert_all(
    tx: AsyncConnection,
    table: Table,
    key: tuple[str, ...],
    rows: Sequence[dict[str, Any]],
    *,
    added: tuple[str, ...] = (),
) -> None:
    """Insert rows, or set all their columns where `key` exists.

    Args:
        tx: the transaction.
        table: the table.
        key: the columns of the primary key.
        rows: the rows, all with the same columns.
        added: the columns in which the row's values are added to the stored ones. If there are any, other columns of
            existing rows are not changed.
    """
    if not rows:
        return
    changed = () if added else tuple(name for name in rows[0] if name not in key)
    statement = upsert_statement(tx.dialect.name, table, key, changed, added)
    for part in portions(rows):
        await tx.execute(statement, part)
