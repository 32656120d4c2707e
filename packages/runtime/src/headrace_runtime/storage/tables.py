"""Tables of every stream service (processed event ids, unsent events, jobs, positions), and statements on them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    delete,
    func,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

# SQLite increments only INTEGER primary keys automatically.
Id = BigInteger().with_variant(Integer, "sqlite")
V = TypeVar("V")
ROWS_AT_ONCE = 200
"""Rows that one statement reads or writes at most, where its caller names no other number."""


def seen(metadata: MetaData) -> Table:
    """Define the table of handled event ids, which are written in the transaction of their effect."""
    return Table(
        "seen",
        metadata,
        Column("event_id", Text, primary_key=True),
        Column("at_ms", BigInteger, nullable=False, index=True),
    )


def outbox(metadata: MetaData) -> Table:
    """Define the table of events of committed effects, which are deleted once the bus has acknowledged them.

    Ids are never reused. Otherwise a process that is not informed of its last commit could delete the rows of that
    commit by the ids of rows that it has sent.
    """
    return Table(
        "outbox",
        metadata,
        Column("id", Id, primary_key=True, autoincrement=True),
        Column("topic", Text, nullable=False),
        Column("key", LargeBinary, nullable=False),
        Column("value", LargeBinary),
        Column("headers", LargeBinary, nullable=False),
        Column("partition", Integer),
        Column("at_ms", BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )


def jobs(metadata: MetaData) -> Table:
    """Define the table of durable jobs. A row exists until its job is finished, and a worker leases it."""
    return Table(
        "jobs",
        metadata,
        Column("job_id", Text, primary_key=True),
        Column("kind", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("due_ms", BigInteger, nullable=False),
        Index("ix_jobs_kind_due", "kind", "due_ms"),
    )


def positions(metadata: MetaData) -> Table:
    """Define the table of positions: the first offset of each partition whose effect is not in this database."""
    return Table(
        "positions",
        metadata,
        Column("topic", Text, primary_key=True),
        Column("partition", Integer, primary_key=True),
        Column("next_offset", BigInteger, nullable=False),
    )


class StreamTables:
    """The four tables of a stream service, which are added to `metadata`."""

    def __init__(self, metadata: MetaData) -> None:
        self.seen = seen(metadata)
        self.outbox = outbox(metadata)
        self.jobs = jobs(metadata)
        self.positions = positions(metadata)


async def upsert(
    tx: AsyncConnection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], *, update: bool = True
) -> bool:
    """Insert the row `key | values`, or set `values` if the key exists (with `update=False`, leave the row unchanged).

    Values must be data, not SQL expressions. Return whether a row was inserted or changed.
    """
    statement = upsert_statement(tx.dialect.name, table, tuple(key), tuple(values) if update else ())
    return bool((await tx.execute(statement, {**key, **values})).rowcount)


def insert_new(tx: AsyncConnection, table: Table, key: tuple[str, ...]) -> Any:
    """Return the statement that inserts rows, also in bulk, and skips those whose `key` exists."""
    return upsert_statement(tx.dialect.name, table, key)


def is_one_of(first: ColumnElement[Any], second: ColumnElement[Any], pairs: Collection[tuple[Any, Any]]) -> Any:
    """Return the condition that (`first`, `second`) is one of `pairs`.

    `first` must have an index. SQLite uses it for the values of one column, but not for pairs.
    """
    return first.in_({value for value, _ in pairs}) & tuple_(first, second).in_(list(pairs))


@lru_cache(maxsize=256)
def upsert_statement(
    dialect: str, table: Table, key: tuple[str, ...], changed: tuple[str, ...] = (), added: tuple[str, ...] = ()
) -> Any:
    """Return the statement that inserts rows, also in bulk, and changes those whose `key` exists.

    It is cached, because building takes several times longer than executing on SQLite.

    Args:
        dialect: `sqlite` or `postgresql`.
        table: the table.
        key: the columns of a unique key.
        changed: the columns that are set in a row that exists.
        added: the columns to which the new value is added in a row that exists.
    """
    insert: Any = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(table)
    columns = [table.c[name] for name in key]
    changes = {name: insert.excluded[name] for name in changed}
    changes |= {name: table.c[name] + insert.excluded[name] for name in added}
    if changes:
        return insert.on_conflict_do_update(index_elements=columns, set_=changes)
    return insert.on_conflict_do_nothing(index_elements=columns)


AT_ONCE_MAX = 15
"""Maximum number of rows of one table that a transaction deletes, which takes a few milliseconds."""
COUNTED_MAX = 10_000
"""Maximum count of rows for a gauge. The gauge does not exceed it."""


def portions(values: Iterable[V], size: int = ROWS_AT_ONCE) -> Iterator[list[V]]:
    """Split values, such as the parameters of a statement, into lists of at most `size`."""
    everything = list(values)
    for at in range(0, len(everything), size):
        yield everything[at : at + size]


def first_within(
    items: Iterable[V], count_max: int, sizes_of: Callable[[V], tuple[int, ...]], sizes_max: tuple[int, ...]
) -> list[V]:
    """Return the first `count_max` items, or as many of them as together exceed none of `sizes_max`.

    The first item is returned whatever its sizes.
    """
    chosen: list[V] = []
    totals = (0,) * len(sizes_max)
    for item in items:
        totals = tuple(map(operator.add, totals, sizes_of(item)))
        if chosen and (len(chosen) == count_max or any(map(operator.gt, totals, sizes_max))):
            break
        chosen.append(item)
    return chosen


async def delete_batch(
    tx: AsyncConnection,
    table: Table,
    old: ColumnElement[bool],
    *,
    order: ColumnElement[Any] | None = None,
    limit: int = AT_ONCE_MAX,
) -> bool:
    """Delete up to `limit` rows that match `old`, the first ones by `order`. Return whether there may be more.

    The column `order` must have an index. None leaves the choice to the database, which then needs one for `old`.
    """
    key = list(table.primary_key.columns)
    batch = select(*key).where(old).limit(limit)
    if order is not None:
        batch = batch.order_by(order)
    row = key[0] if len(key) == 1 else tuple_(*key)
    return (await tx.execute(delete(table).where(row.in_(batch)))).rowcount >= limit


async def count_rows(tx: AsyncConnection, condition: ColumnElement[bool] | None, table: Table, limit: int) -> int:
    """Return the number of rows of `table` that match `condition`, at most `limit`."""
    keys = select(*list(table.primary_key.columns)[:1])
    matching_keys = (keys if condition is None else keys.where(condition)).limit(limit)
    return await tx.scalar(select(func.count()).select_from(matching_keys.subquery())) or 0
