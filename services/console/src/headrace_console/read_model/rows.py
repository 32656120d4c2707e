"""Rows of one batch: loaded by key in few statements, changed in memory, and written in few statements."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, LargeBinary, RowMapping, Select, Table, Text, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import pack_numbers, unpack_numbers
from headrace_console.read_model.portions import upsert_all
from headrace_runtime.storage.tables import is_one_of, portions

EDITS_MAX = 100
"""Largest number of edits of a session whose digests are stored, so that a withdrawal can be matched."""


@dataclass(slots=True)
class SessionRow:
    """Summary of one session."""

    id: int
    session_key: str
    tenant: int
    session_id: str | None = None
    model: int = 0
    version: int = 0
    began_ms: int = 0
    last_ms: int = 0
    turns: int = 0
    tokens: int = 0
    trained: int = 0
    waiting: int = 0
    dropped: int = 0
    status: int = 0
    reward: float | None = None
    thumb: int | None = None
    flags: int = 0
    task_id: str | None = None
    title: str | None = None
    edits: Sequence[str] = ()
    """Digests of the valid edits of its answers, at most `EDITS_MAX`."""
    read_day: int = 0


@dataclass(slots=True)
class TurnRow:
    """A turn, or a stub of a turn whose id is known only from later events.

    The row in the table has only the end of the name. The beginning, and the tenant, are in the row of the session.
    """

    id: int
    name: bytes
    tenant: int
    session: int = 0
    model: int = 0
    version: int = 0
    at_ms: int = 0
    partition: int = 0
    log_offset: int = -1
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    eval: bool = False
    refused: bool = False
    untrained: int | None = None
    no_logprobs: int | None = None
    status: int = 0
    finish: int | None = None
    latency_ms: int = 0
    arm: int | None = None
    choices: int = 1
    trajectories: tuple[int, ...] = ()
    experiences: tuple[int, ...] = ()

    @property
    def is_captured(self) -> bool:
        """Whether the turn's own event was read; False for a turn that is known only by events which refer to it."""
        return self.log_offset >= 0


@dataclass(slots=True)
class TrajectoryRow:
    """A trajectory, or a stub of a trajectory whose id is known only from rewards."""

    id: int
    name: bytes
    session: int = 0
    model: int = 0
    partition: int = 0
    log_offset: int = -1
    eval: bool = False
    ingested: bool = False
    refused: bool = False
    untrained: int | None = None
    turns: tuple[int, ...] = ()
    left_out: Mapping[int, int] = field(default_factory=dict)
    """Number of the reason by turn."""
    no_logprobs: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class ExperienceRow:
    """The newest revision of an experience with its outcomes, or a stub if only its outcomes were read."""

    id: int
    name: bytes
    session: int = 0
    revision: int = -1
    partition: int = 0
    log_offset: int = -1
    reward: float | None = None
    no_reward: int | None = None
    weight: float = 1.0
    refused: bool = False
    turns: tuple[int, ...] = ()
    history: Sequence[Sequence[Any]] = ()
    """Entries of the column of this name. A change replaces the whole sequence."""
    read_day: int = 0
    event: bytes | None = None
    """Packed event id of the newest revision, or None if the batch does not need it. It is not stored."""


@dataclass(slots=True)
class LetterRow:
    """A dead letter with its newest decision, or a stub if only its decisions were read."""

    id: int
    name: bytes
    subject: bytes = b""
    service: int = 0
    topic: int = 0
    reason: int = 0
    error: str = ""
    at_ms: int = 0
    partition: int = 0
    log_offset: int = -1
    state: int = 0
    decisions: int = 0
    read_day: int = 0


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
    """Rows of one table that a batch may change, by id and by unique key."""

    def __init__(self, table: Table, row: type[R], key: tuple[str, ...]) -> None:
        """Create an empty set. `key` are the columns of the unique key, the most selective one first."""
        self._table = table
        self._row: type[R] = row
        self._key = key
        self._columns = [field.name for field in fields(row) if field.name in table.c]
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
        """Delete a loaded row when the batch is stored."""
        del self._by_id[row.id], self._by_key[tuple(getattr(row, name) for name in self._key)]
        self._removed.append(row.id)

    async def begin(self, tx: AsyncConnection) -> None:
        """Read the highest id of the table, after which new rows are numbered."""
        last = await tx.scalar(select(func.max(self._table.c.id)))
        self._next_id = (last or 0) + 1

    async def load_keys(self, tx: AsyncConnection, keys: Collection[tuple[Any, ...]]) -> None:
        """Load the rows with these keys."""
        columns = [self._table.c[name] for name in self._key]
        for part in portions({key for key in keys if key not in self._by_key}):
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
        for part in portions(set(values)):
            query = self._query().where(self._is_in(column, part)).limit(limit)
            rows += self._add_loaded((await tx.execute(query)).mappings())
        return rows

    async def load_ids(self, tx: AsyncConnection, ids: Iterable[int]) -> None:
        """Load the rows with these numbers."""
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
        """Return the values of a loaded row, converted from their compact forms."""
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

    def _values(self, row: R) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self._columns)

    async def write_changes(self, tx: AsyncConnection) -> None:
        """Write new and changed rows, and delete the removed ones."""
        changed = [values for row in self._by_id.values() if self._loaded.get(row.id) != (values := self._values(row))]
        for part in portions(changed):
            await upsert_all(tx, self._table, ("id",), [self._write(values) for values in part])
        for ids in portions(self._removed):
            await tx.execute(delete(self._table).where(self._table.c.id.in_(ids)))


NAMES_MAX = 100_000
"""Number of stored texts from which on new sources and versions share the number of `OTHER`."""
_REASONS_MAX = 10_000
"""Number of further texts from which on new reasons and other words of events share it too."""
_IDENTITIES_MAX = 10_000
"""Number of further texts from which on a new tenant, model or lineage is refused."""
OTHER = "(other)"


class NameTableFull(Exception):
    """Raised for a record with a new tenant, model or lineage when the table of names has its maximum of rows. The
    record cannot be stored.
    """


class Names:
    """Numbers, from 1 on, that stand for texts in the rows.

    A batch must call `refresh` first and `store` at its end.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._stored_until = 0

    def number(self, text: str) -> int:
        """Return the number of a tenant, a model or a lineage, a new one if it has none.

        Raises:
            NameTableFull: there are too many texts. Rows of different tenants, models and lineages must not be merged.
        """
        number = self._ids.get(text)
        if number is None:
            most = NAMES_MAX + _REASONS_MAX + _IDENTITIES_MAX
            if len(self._texts) >= most:
                raise NameTableFull(
                    f"console: {most} names are stored, so {text[:100]!r} gets no number and its records are skipped; "
                    "delete the console's database, so that names that are no longer used are dropped"
                )
            number = self._add(text)
        return number

    def shared_number(self, text: str, *, is_open: bool = False, other: str = OTHER) -> int:
        """Return the number of a text, which it shares with others once there are too many texts.

        Args:
            text: the text.
            is_open: whether the text is a source or a version. There may be any number of these, so they are limited
                earlier, and numbers are left for reasons.
            other: the text that stands for all texts beyond the limit.
        """
        number = self._ids.get(text)
        if number is None and len(self._texts) >= NAMES_MAX + (0 if is_open else _REASONS_MAX):
            number, text = self._ids.get(other), other
        return self._add(text) if number is None else number

    def _add(self, text: str) -> int:
        number = len(self._texts) + 1
        self._ids[text], self._texts[number] = number, text
        return number

    def text(self, number: int) -> str:
        """Return the text with this number."""
        return self._texts[number]

    async def refresh(self, tx: AsyncConnection) -> None:
        """Read the texts that were stored since the last call, and forget those that no transaction has stored."""
        for number in range(self._stored_until + 1, len(self._texts) + 1):
            del self._ids[self._texts.pop(number)]
        table = tables.names
        for row in await tx.execute(select(table).where(table.c.id > self._stored_until).order_by(table.c.id)):
            self._ids[row.name], self._texts[row.id] = row.id, row.name
        self._stored_until = len(self._texts)

    async def store(self, tx: AsyncConnection) -> None:
        """Write new texts. The texts count as stored after the next `refresh`."""
        new = [{"id": n, "name": self._texts[n]} for n in range(self._stored_until + 1, len(self._texts) + 1)]
        if new:
            await tx.execute(insert(tables.names), new)
