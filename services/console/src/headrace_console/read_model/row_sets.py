"""Rows of one batch: loaded by key in few statements, changed in memory, and written in few statements.

Statements and loops work in portions, so that each blocks the event loop for at most a few milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, LargeBinary, RowMapping, ScalarSelect, Select, Table, Text, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import join_turn, pack_numbers, split_turn, unpack_numbers
from headrace_console.read_model.queries import turns_query
from headrace_console.read_model.rows import ExperienceRow, LetterRow, SessionRow, TrajectoryRow, TurnRow
from headrace_runtime.storage.tables import is_one_of, split_into_batches, upsert_statement

T = TypeVar("T")
_TURN_S = 0.002
"""Seconds for which events or rows are processed before other tasks run."""


async def with_pauses(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield events or rows, and let other tasks run after each `_TURN_S` of their processing.

    A pause for each item would cost more than the processing of most items.
    """
    began_s = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began_s > _TURN_S:
            await asyncio.sleep(0)
            began_s = time.monotonic()


async def upsert_all(
    tx: AsyncConnection,
    table: Table,
    key: tuple[str, ...],
    rows: Sequence[dict[str, Any]],
    *,
    added: tuple[str, ...] = (),
) -> None:
    """Insert rows. Where a row with the same `key` exists, overwrite its other columns.

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
    for part in split_into_batches(rows):
        await tx.execute(statement, part)


_PAIRS_AT_ONCE = 40


def _reasons_by_turn(column: str | None) -> Mapping[int, int]:
    return {int(turn): reason for turn, reason in json.loads(column).items()} if column else {}


def _list(column: str | None) -> Sequence[Any]:
    return json.loads(column) if column else ()


def _json(content: Any) -> str | None:
    return json.dumps(content, separators=(",", ":")) if content else None


_CONVERSIONS: Mapping[str, tuple[type[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "trajectories": (LargeBinary, unpack_numbers, pack_numbers),
    "experiences": (LargeBinary, unpack_numbers, pack_numbers),
    "turns": (LargeBinary, unpack_numbers, pack_numbers),
    "left_out": (Text, _reasons_by_turn, _json),
    "no_logprobs": (Text, _reasons_by_turn, _json),
    "history": (Text, _list, _json),
    "edits": (Text, _list, _json),
}
"""Columns that are stored in a compact form: the type of the column, and the functions that read and write it. A column
of the same name with another type, such as the number of turns of a session, is not converted."""
R = TypeVar("R", SessionRow, TurnRow, TrajectoryRow, ExperienceRow, LetterRow)


class RowSet(Generic[R]):
    """Rows of one table that a batch may change, accessible by id and by unique key."""

    def __init__(self, table: Table, row: type[R], key: tuple[str, ...]) -> None:
        """Create an empty set. `key` are the columns of the unique key, the most selective one first."""
        self._table = table
        self._row: type[R] = row
        self._key = key
        self._columns = [field.name for field in fields(row) if field.name in table.c]
        self._values: Callable[[R], tuple[Any, ...]] = attrgetter(*self._columns)
        self._conversions = {
            name: (read, write)
            for name, (kind, read, write) in _CONVERSIONS.items()
            if name in table.c and isinstance(table.c[name].type, kind)
        }
        self._by_id: dict[int, R] = {}
        self._by_key: dict[tuple[Any, ...], R] = {}
        self._loaded: dict[int, tuple[Any, ...]] = {}
        self._removed: list[int] = []
        self._next_id = 0

    def __iter__(self) -> Iterator[R]:
        return iter(self._by_id.values())

    def __getitem__(self, row_id: int) -> R:
        return self._by_id[row_id]

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._by_id

    def find(self, *key: Any) -> R | None:
        """Return the loaded row with this key, or None."""
        return self._by_key.get(key)

    def add(self, *key: Any) -> R:
        """Return the row with this unique key, or create it with the next free id.

        The caller must have loaded the row before if the database has it.
        """
        row = self._by_key.get(key)
        if row is None:
            row = self._row(self._next_id, *key)
            self._next_id += 1
            self._by_id[row.id] = self._by_key[key] = row
        return row

    def remove(self, row: R) -> None:
        """Mark a loaded row to be deleted when the batch is stored."""
        del self._by_id[row.id], self._by_key[tuple(getattr(row, name) for name in self._key)]
        self._removed.append(row.id)

    @property
    def last_id(self) -> ScalarSelect[int]:
        """Query for the highest id of the table."""
        return select(func.max(self._table.c.id)).scalar_subquery()

    def begin(self, last_id: int | None) -> None:
        """Number new rows after the highest id of the table, None if the table is empty."""
        self._next_id = (last_id or 0) + 1

    async def load_keys(self, tx: AsyncConnection, keys: Collection[tuple[Any, ...]]) -> None:
        """Load the rows with these values of the unique key."""
        columns = [self._table.c[name] for name in self._key]
        for part in split_into_batches({key for key in keys if key not in self._by_key}):
            condition = self._is_in(self._key[0], [key[0] for key in part])
            if len(columns) > 1:
                condition = is_one_of(columns[0], columns[1], part)
            self._add_loaded((await tx.execute(self._query().where(condition))).mappings())

    async def load_where(
        self, tx: AsyncConnection, column: str, values: Collection[Any], limit: int | None = None
    ) -> list[R]:
        """Load and return the rows whose `column`, which must have an index, has one of these values.

        Args:
            tx: the transaction.
            column: name of the column.
            values: the values.
            limit: largest number of rows for each `ROWS_AT_ONCE` values, or None for all.
        """
        rows: list[R] = []
        for part in split_into_batches(set(values)):
            query = self._query().where(self._is_in(column, part)).limit(limit)
            rows += self._add_loaded((await tx.execute(query)).mappings())
        return rows

    async def load_ids(self, tx: AsyncConnection, ids: Iterable[int]) -> None:
        """Load the rows with these ids."""
        await self.load_where(tx, "id", {row_id for row_id in ids if row_id not in self._by_id})

    def _is_in(self, column: str, values: Sequence[Any]) -> ColumnElement[bool]:
        return tables.is_named(self._table, values) if column == "name" else self._table.c[column].in_(values)

    def _query(self) -> Select[Any]:
        return select(self._table)

    def _add_loaded(self, mappings: Iterable[RowMapping]) -> list[R]:
        rows = []
        for mapping in mappings:
            row = self._by_id.get(mapping["id"])
            if row is None:
                row = self._row(**self._read(mapping))
                self._by_id[row.id] = row
                self._by_key[tuple(getattr(row, name) for name in self._key)] = row
                self._loaded[row.id] = self._values(row)
            rows.append(row)
        return rows

    def _read(self, mapping: RowMapping) -> dict[str, Any]:
        """Return the values of a loaded row by column, converted from their compact forms."""
        values = {name: mapping[name] for name in self._columns}
        for name, (read, _) in self._conversions.items():
            values[name] = read(values[name])
        return values

    def _write(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the values of a row, converted to their compact forms."""
        record = dict(zip(self._columns, values, strict=True))
        for name, (_, write) in self._conversions.items():
            record[name] = write(record[name])
        return record

    async def write_changes(self, tx: AsyncConnection) -> None:
        """Write new and changed rows, and delete the removed ones."""
        changed = [values for row in self._by_id.values() if self._loaded.get(row.id) != (values := self._values(row))]
        for part in split_into_batches(changed):
            await upsert_all(tx, self._table, ("id",), [self._write(values) for values in part])
        for ids in split_into_batches(self._removed):
            await tx.execute(delete(self._table).where(self._table.c.id.in_(ids)))


class TurnSet(RowSet[TurnRow]):
    """Turns that a batch may change, by the packed id and the tenant."""

    def __init__(self, sessions: RowSet[SessionRow]) -> None:
        """Create an empty set. Before turns are loaded by key, `sessions` must contain their sessions."""
        super().__init__(tables.turns, TurnRow, ("name", "tenant"))
        self._sessions = sessions

    async def load_keys(self, tx: AsyncConnection, keys: Collection[tuple[Any, ...]]) -> None:
        """Load the turns with these packed ids and tenants."""
        in_sessions, foreign = [], []
        for name, tenant in keys:
            session_key, stored = split_turn(name)
            if session_key is None:
                foreign.append(stored)
            elif (session := self._sessions.find(session_key, tenant)) is not None:
                in_sessions.append((session.id, stored))
        await self._load_in_sessions(tx, in_sessions)
        await self._load_foreign(tx, foreign)

    async def load_names(self, tx: AsyncConnection, names: Iterable[bytes]) -> None:
        """Load the turns with these packed ids, of any tenant."""
        split = [split_turn(name) for name in names]
        keys = {session_key for session_key, _ in split if session_key is not None}
        numbers: dict[str, list[int]] = {}
        for session in await self._sessions.load_where(tx, "session_key", keys):
            numbers.setdefault(session.session_key, []).append(session.id)
        pairs = [(number, stored) for key, stored in split if key is not None for number in numbers.get(key, ())]
        await self._load_in_sessions(tx, pairs)
        await self._load_foreign(tx, [stored for key, stored in split if key is None])

    async def _load_in_sessions(self, tx: AsyncConnection, pairs: Iterable[tuple[int, bytes]]) -> None:
        """Load the turns with these pairs of a session id and a stored name.

        SQLite uses no index for pairs, so each session is searched for each name of a portion. Small portions of sorted
        pairs limit the number of these searches.
        """
        for part in split_into_batches(sorted(set(pairs)), _PAIRS_AT_ONCE):
            sessions, names = {session for session, _ in part}, {name for _, name in part}
            query = self._query().where(tables.turns.c.session.in_(sessions), tables.is_named(tables.turns, names))
            self._add_loaded((await tx.execute(query)).mappings())

    async def _load_foreign(self, tx: AsyncConnection, names: Iterable[bytes]) -> None:
        for part in split_into_batches(set(names)):
            query = self._query().where(tables.IS_FOREIGN, tables.turns.c.name.in_(part))
            self._add_loaded((await tx.execute(query)).mappings())

    def _query(self) -> Select[Any]:
        return turns_query()

    def _read(self, mapping: RowMapping) -> dict[str, Any]:
        name = join_turn(mapping["session_key"], mapping["name"])
        return {**super()._read(mapping), "name": name, "tenant": mapping["tenant"]}

    def _write(self, values: Sequence[Any]) -> dict[str, Any]:
        record = super()._write(values)
        record["name"] = split_turn(record["name"])[1]
        return record
