"""Detection and removal of damaged rows that the checksums could not repair.

A damaged batch is removed, so its log has a gap, which clients skip like the gaps of compaction. Each record is either
delivered as it was produced, or reported in a `LostRange`.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from headrace_broker.batch import HEADER_BYTES, checksum_fits, parse
from headrace_broker.errors import Malformed
from headrace_broker.group import SavedGroup
from headrace_broker.log import ProducerState
from headrace_broker.store_format import TABLE_NAMES, offset_of, partition_of, position
from headrace_broker.topic_config import TopicConfig
from headrace_broker.wire import WireReader, decode
from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class LostRange(NamedTuple):
    """Range of lost offsets in a partition, with the reason and, if they are readable, the damaged bytes."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    error: str
    raw: bytes = b""


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error of SQLite means that the file is damaged, in contrast to a full disk or a lock."""
    code: int = getattr(error, "sqlite_errorcode", 0) or 0
    return code & 0xFF in _DAMAGED


def batch_problem(offset: int, last_offset: int, payload: bytes) -> str | None:
    """Return a description of what is wrong with a stored batch, or None if it is valid."""
    if len(payload) < HEADER_BYTES:
        return f"it has only {len(payload)} bytes"
    batch = parse(payload)
    if batch.base_offset != offset or batch.last_offset != last_offset:
        return f"its header has offsets {batch.base_offset} to {batch.last_offset}"
    return None if checksum_fits(payload) else "its checksum does not match"


def is_intact(db: sqlite3.Connection) -> bool:
    """Return whether SQLite finds no damage in the file's structure. Raises `sqlite3.DatabaseError` if the file is not
    a database."""
    try:
        return [row[0] for row in db.execute("PRAGMA quick_check(1)")] == ["ok"]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_NOTADB:
            raise
        return False


def remove_damaged(db: sqlite3.Connection) -> list[LostRange]:
    """Delete damaged batches and repair other damaged rows, in one transaction. Return the ranges of offsets that were
    lost."""
    partitions = {key: (topic, number) for key, topic, number in db.execute("SELECT id, topic, number FROM partitions")}
    lost = []
    db.execute("BEGIN IMMEDIATE")
    for row_id, last_offset, payload in db.execute("SELECT position, last_offset, payload FROM batches"):
        error = batch_problem(offset_of(row_id), last_offset, payload)
        partition = partitions.get(partition_of(row_id))
        if error is not None:
            db.execute("DELETE FROM batches WHERE position = ?", (row_id,))
            statement = "UPDATE partitions SET bytes = max(bytes - ?, 0) WHERE id = ?"
            db.execute(statement, (len(payload), partition_of(row_id)))
            if partition is not None:
                last = max(last_offset, offset_of(row_id))
                lost.append(LostRange(*partition, offset_of(row_id), last, error, bytes(payload)))
    for table, key, column, read, remedy in _DECODED_COLUMNS:
        for row_key, value in db.execute(f"SELECT {key}, {column} FROM {table}").fetchall():  # noqa: S608 (our names)
            if not _is_readable(read, value):
                db.execute(f"{remedy} WHERE {key} = ? AND {column} = ?", (row_key, value))
                log.error("row_taken_out", table=table, key=row_key, remedy=remedy)
    db.execute("COMMIT")
    return lost


def _is_readable(read: Callable[[Any], object], value: object) -> bool:
    try:
        read(value)
    except (ValueError, TypeError, struct.error, Malformed):
        return False
    return True


def _state(value: bytes) -> object:
    return decode(SavedGroup, WireReader(value)) if value else None


def _sent(value: bytes) -> object:
    return ProducerState.unpacked(0, value, None, 0)


_DECODED_COLUMNS: tuple[tuple[str, str, str, Callable[[Any], object], str], ...] = (
    ("topics", "name", "config", TopicConfig.unpacked, "UPDATE topics SET config = '[]'"),
    ("transactions", "id", "partitions", json.loads, "DELETE FROM transactions"),
    ("groups", "id", "state", _state, "UPDATE groups SET state = x''"),
    ("producers", "producer_id", "recent", _sent, "DELETE FROM producers"),
)
"""Columns that the broker decodes at its start, each with the statement that removes a damaged value. Members of a
group without a value join again, producers start again, and topics get the default settings."""


def copy(damaged: sqlite3.Connection, fresh: sqlite3.Connection) -> list[LostRange]:
    """Copy the readable rows of a damaged file into a new one. Return the ranges of offsets that were lost."""
    fresh.execute("BEGIN IMMEDIATE")
    for table in TABLE_NAMES:
        if table != "batches":
            _insert(fresh, table, _readable_rows(damaged, table, "", ()))
    for (partition_id,) in fresh.execute("SELECT id FROM partitions").fetchall():
        span = (position(partition_id, 0), position(partition_id + 1, 0))
        rows = _readable_rows(damaged, "batches", "WHERE position >= ? AND position < ?", span)
        _insert(fresh, "batches", rows)
    fresh.execute(
        "INSERT OR IGNORE INTO topics SELECT DISTINCT topic, '[]' FROM partitions"  # with the settings of new topics
    )
    fresh.execute(
        "UPDATE partitions SET bytes = (SELECT coalesce(sum(length(payload)), 0) FROM batches"
        " WHERE position >= id << 44 AND position < (id + 1) << 44), cleaned_to = 0, clean_bytes = 0"
    )
    lost = list(_gaps(fresh))
    fresh.execute("COMMIT")
    return lost


def _readable_rows(
    db: sqlite3.Connection, table: str, where: str, values: tuple[int, ...]
) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a table from the first one up to an unreadable one, then from the last one backwards to an
    unreadable one."""
    keys = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[5]]
    for direction in ("", " DESC"):
        order = ", ".join(f"{key}{direction}" for key in keys)
        try:
            yield from db.execute(f"SELECT * FROM {table} {where} ORDER BY {order}", values)  # noqa: S608 (our names)
        except sqlite3.DatabaseError:
            continue
        return


def _insert(db: sqlite3.Connection, table: str, rows: Iterable[tuple[object, ...]]) -> None:
    for row in rows:
        marks = ", ".join("?" * len(row))
        db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)  # noqa: S608 (our names)


def _gaps(db: sqlite3.Connection) -> Iterator[LostRange]:
    """Yield the ranges of offsets without a batch, in topics that are not compacted."""
    query = (
        "SELECT id, topic, number, log_start, log_end FROM partitions JOIN topics ON topic = name"
        " WHERE config NOT LIKE '%compact%'"
    )
    for partition_id, topic, number, start, end in db.execute(query).fetchall():
        expected = start
        span = (position(partition_id, 0), position(partition_id + 1, 0))
        rows = db.execute("SELECT position, last_offset FROM batches WHERE position >= ? AND position < ?", span)
        for row_id, last_offset in [*rows, (position(partition_id, end), end - 1)]:
            if offset_of(row_id) > expected:
                yield LostRange(topic, number, expected, offset_of(row_id) - 1, "this part of the file cannot be read")
            expected = max(expected, last_offset + 1)
