"""Deletes and counts rows in small batches, because each batch blocks other writers of the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Table, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

AT_ONCE_MAX = 15
"""Maximum number of rows of one table that a transaction deletes, which takes a few milliseconds."""
COUNTED_MAX = 10_000
"""Maximum count of rows for a gauge. The gauge does not exceed it."""


async def delete_batch(
    tx: AsyncConnection, table: Table, old: ColumnElement[bool], *, order: ColumnElement[Any], limit: int = AT_ONCE_MAX
) -> bool:
    """Delete up to `limit` rows that match `old`, the first ones by `order`. Return whether there may be more.

    The column `order` must have an index.
    """
    (key,) = table.primary_key.columns
    batch = select(key).where(old).order_by(order).limit(limit)
    return (await tx.execute(delete(table).where(key.in_(batch)))).rowcount >= limit


async def count_rows(tx: AsyncConnection, condition: ColumnElement[bool] | None, table: Table, limit: int) -> int:
    """Return the number of rows of `table` that match `condition`, at most `limit`."""
    keys = select(*list(table.primary_key.columns)[:1])
    matching_keys = (keys if condition is None else keys.where(condition)).limit(limit)
    return await tx.scalar(select(func.count()).select_from(matching_keys.subquery())) or 0
