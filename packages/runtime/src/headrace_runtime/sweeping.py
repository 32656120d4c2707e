"""Deletes and counts rows in small steps, because each step blocks other writers of the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Table, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

AT_ONCE_MAX = 15
"""Rows that one transaction forgets of a table: a few milliseconds of work."""
COUNTED_MAX = 10_000
"""Rows are counted so far for a gauge; it stays there however many there are."""


async def remove_some(
    tx: AsyncConnection, table: Table, old: ColumnElement[bool], *, order: ColumnElement[Any], limit: int = AT_ONCE_MAX
) -> bool:
    """Delete the first rows by `order` that are `old`; an index on `order` finds them. Whether there may be more."""
    (key,) = table.primary_key.columns
    some = select(key).where(old).order_by(order).limit(limit)
    return (await tx.execute(delete(table).where(key.in_(some)))).rowcount >= limit


async def count_some(tx: AsyncConnection, condition: ColumnElement[bool] | None, table: Table, limit: int) -> int:
    """How many rows of `table` meet `condition`, up to `limit`."""
    some = select(*list(table.primary_key.columns)[:1])
    found = (some if condition is None else some.where(condition)).limit(limit)
    return await tx.scalar(select(func.count()).select_from(found.subquery())) or 0
