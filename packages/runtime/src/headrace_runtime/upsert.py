"""Insert-or-update, which SQLAlchemy spells differently for SQLite and PostgreSQL."""

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
    """Insert `key | values`; when the primary key is taken, set `values` (or, with `update=False`, leave the row).

    Values are data, no SQL expressions. Returns whether a row was inserted or changed.
    """
    statement = _statement(tx.dialect.name, table, tuple(key), tuple(values) if update else ())
    return bool((await tx.execute(statement, {**key, **values})).rowcount)


def insert_new(tx: AsyncConnection, table: Table, key: tuple[str, ...]) -> Any:
    """Return the statement that inserts rows, many at a time, and leaves those as they are whose `key` is taken."""
    return _statement(tx.dialect.name, table, key, ())


@lru_cache(maxsize=256)
def _statement(dialect: str, table: Table, key: tuple[str, ...], changed: tuple[str, ...]) -> Any:
    """Built once: building costs several times what SQLite needs to run it."""
    insert: Any = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(table)
    columns = [table.c[name] for name in key]
    if changed:
        return insert.on_conflict_do_update(
            index_elements=columns, set_={name: insert.excluded[name] for name in changed}
        )
    return insert.on_conflict_do_nothing(index_elements=columns)
