"""Insert-or-update statements, for which SQLAlchemy has different APIs on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection


async def upsert(
    tx: AsyncConnection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], *, update: bool = True
) -> bool:
    """Insert the row `key | values`, or set `values` if the key exists (with `update=False`, leave the row unchanged).

    Values must be data, not SQL expressions. Return whether a row was inserted or changed.
    """
    statement = _statement(tx.dialect.name, table, tuple(key), tuple(values) if update else ())
    return bool((await tx.execute(statement, {**key, **values})).rowcount)


def insert_new(tx: AsyncConnection, table: Table, key: tuple[str, ...]) -> Any:
    """Return the statement that inserts rows, also in bulk, and skips those whose `key` exists."""
    return _statement(tx.dialect.name, table, key, ())


@lru_cache(maxsize=256)
def _statement(dialect: str, table: Table, key: tuple[str, ...], changed: tuple[str, ...]) -> Any:
    """Build the statement. It is cached, because building takes several times longer than executing on SQLite."""
    insert: Any = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(table)
    columns = [table.c[name] for name in key]
    if changed:
        return insert.on_conflict_do_update(
            index_elements=columns, set_={name: insert.excluded[name] for name in changed}
        )
    return insert.on_conflict_do_nothing(index_elements=columns)
