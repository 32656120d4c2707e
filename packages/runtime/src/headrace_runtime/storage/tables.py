"""Tables that every stream service has (handled event ids, unsent events, jobs, positions), and helpers for
statements."""

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
"""Default of the maximum number of rows that one statement reads or writes."""


def seen(metadata: MetaData) -> Table:
    """Define the table of the ids of handled events. An id is inserted in the transaction that contains the event's
    effect."""
    return Table(
        "seen",
        metadata,
        Column("event_id", Text, primary_key=True),
        Column("at_ms", BigInteger, nullable=False, index=True),
    )


def outbox(metadata: MetaData) -> Table:
    """Define the table of events to be sent. They are inserted in the transaction of their effect, and deleted after
    the bus has acknowledged them.

    Row ids are never reused. Otherwise a process that does not know whether its last commit succeeded could delete the
    rows of that commit, mistaking them for rows that it has sent.
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
    """Define the table of durable jobs. A row exists until its job is finished. A worker leases a row while it works on
    it."""
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
    """Define the table of positions: for each partition, the first offset whose effect is not in this database."""
    return Table(
        "positions",
        metadata,
        Column("topic", Text, primary_key=True),
        Column("partition", Integer, primary_key=True),
        Column("next_offset", BigInteger, nullable=False),
    )


class StreamTables:
    """The four tables that every stream service has. They are added to `metadata`."""

    def __init__(self, metadata: MetaData) -> None:
        self.seen = seen(metadata)
        self.outbox = outbox(metadata)
        self.jobs = jobs(metadata)
        self.positions = positions(metadata)


async def upsert(
    tx: AsyncConnection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], *, update: bool = True
) -> bool:
    """Insert a row with `key` and `values`. If a row with the key exists, set its `values`, or with `update=False`
    leave it unchanged. Return whether a row was inserted or changed.

    Values must be data, not SQL expressions.
    """
    statement = upsert_statement(tx.dialect.name, table, tuple(key), tuple(values) if update else ())
    return bool((await tx.execute(statement, {**key, **values})).rowcount)


def insert_new(tx: AsyncConnection, table: Table, key: tuple[str, ...]) -> Any:
    """Return a statement that inserts one or many rows, and skips those whose `key` exists."""
    return upsert_statement(tx.dialect.name, table, key)


def is_one_of(first: ColumnElement[Any], second: ColumnElement[Any], pairs: Collection[tuple[Any, Any]]) -> Any:
    """Return the SQL condition that the pair (`first`, `second`) is one of `pairs`.

    `first` must have an index. SQLite uses an index for the values of one column, but not for pairs.
    """
    return first.in_({value for value, _ in pairs}) & tuple_(first, second).in_(list(pairs))


@lru_cache(maxsize=256)
def upsert_statement(
    dialect: str, table: Table, key: tuple[str, ...], changed: tuple[str, ...] = (), added: tuple[str, ...] = ()
) -> Any:
    """Return a statement that inserts one or many rows, and changes those whose `key` exists.

    The statement is cached, because building it takes several times longer than executing it on SQLite.

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
"""Default of the maximum number of rows that one transaction deletes from a table, which takes a few milliseconds."""
COUNTED_MAX = 10_000
"""Number at which counting the rows of a table for a gauge stops."""


def split_into_batches(values: Iterable[V], size: int = ROWS_AT_ONCE) -> Iterator[list[V]]:
    """Split values, for example the parameters of a statement, into lists of at most `size` elements."""
    everything = list(values)
    for at in range(0, len(everything), size):
        yield everything[at : at + size]


def take_within_limits(
    items: Iterable[V], count_max: int, sizes_of: Callable[[V], tuple[int, ...]], sizes_max: tuple[int, ...]
) -> list[V]:
    """Return the longest prefix of `items` with at most `count_max` items whose sizes, added up, stay within
    `sizes_max`.

    The first item is always returned, whatever its sizes.
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
    """Delete up to `limit` rows for which `old` is true, in the order of `order`. Return whether there may be more of
    them.

    The column `order` must have an index. Without `order` the database chooses the rows, and `old` must have an index.
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
