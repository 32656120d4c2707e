"""Insert-or-update, the one statement that SQLAlchemy spells differently for our two databases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection


async def upsert(
    tx: AsyncConnection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], *, update: bool = True
) -> bool:
    """Insert `key | values`; when the primary key is taken, set `values` (or, with `update=False`, leave the row).

    Returns whether a row was inserted or changed.
    """
    insert = sqlite.insert if tx.dialect.name == "sqlite" else postgresql.insert
    statement: Any = insert(table).values(**key, **values)
    columns = [table.c[name] for name in key]
    if update and values:
        statement = statement.on_conflict_do_update(index_elements=columns, set_=dict(values))
    else:
        statement = statement.on_conflict_do_nothing(index_elements=columns)
    return bool((await tx.execute(statement)).rowcount)
