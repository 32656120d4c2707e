"""What is read from the file: batches, the aborted transactions among them, offsets by time, committed offsets.

The functions take a connection of their own and run on a reader thread. They see committed data only.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from headrace_broker.batch import parse
from headrace_broker.errors import Damaged, Malformed
from headrace_broker.idempotence import ProducerState
from headrace_broker.inspection import fault
from headrace_broker.protocol.fetch import AbortedTransaction
from headrace_broker.protocol.transactions import ActiveProducer
from headrace_broker.records import records
from headrace_broker.store_format import offset_of, position


class ReadRequest(NamedTuple):
    """Batches of a partition from the one that holds `offset` up to `before`."""

    partition_id: int
    offset: int
    before: int
    bytes_max: int
    read_committed: bool


class ReadResult(NamedTuple):
    """The answer to a `ReadRequest`; `aborted` is None unless it asked for read_committed."""

    records: bytes
    aborted: tuple[AbortedTransaction, ...] | None


def batches(db: sqlite3.Connection, wants: Sequence[ReadRequest], bytes_max: int) -> list[ReadResult]:
    """Whole batches for each want, all of one moment, at most `bytes_max` but for the first batch found."""
    answers = []
    left = bytes_max
    with _snapshot(db):
        for want in wants:
            found, end = _read(db, want, min(left, want.bytes_max), first=left == bytes_max)
            left = max(left - len(found), 0)
            answers.append(ReadResult(found, _aborted(db, want, end) if want.read_committed else None))
    return answers


def offset_at_time(db: sqlite3.Connection, partition_id: int, start: int, end: int, timestamp: int) -> tuple[int, int]:
    """Offset and time of the first record in [start, end) that is not older than `timestamp`; (-1, -1) without one."""
    with _snapshot(db):
        start = _first_reaching(db, partition_id, start, end, timestamp)
        rows = db.execute(
            "SELECT payload FROM batches WHERE position >= ? AND position < ? AND max_timestamp >= ? ORDER BY position",
            (position(partition_id, start), position(partition_id, end), timestamp),
        )
        for (payload,) in rows:
            batch = parse(payload)
            try:
                for record in records(batch):
                    if record.timestamp >= timestamp:
                        return record.offset, record.timestamp
            except Malformed:  # the producer compressed it; a time lookup treats the batch as one record
                return batch.base_offset, batch.max_timestamp
    return -1, -1


def committed(
    db: sqlite3.Connection, group_id: str
) -> tuple[dict[tuple[str, int], tuple[int, str | None]], Set[tuple[str, int]]]:
    """A group's offsets and metadata by topic and partition; and for which of them a transaction may bring others."""
    query = "SELECT topic, partition, committed, metadata FROM offsets WHERE group_id = ? ORDER BY topic, partition"
    pending = "SELECT topic, partition FROM pending_offsets WHERE group_id = ?"
    with _snapshot(db):
        found = {(row[0], row[1]): (row[2], row[3]) for row in db.execute(query, (group_id,))}
        return found, set(db.execute(pending, (group_id,)))


def producers(db: sqlite3.Connection, partition_id: int) -> tuple[ActiveProducer, ...]:
    """What a partition remembers of its producers."""
    query = "SELECT producer_id, epoch, recent, open_from, seen_ms FROM producers WHERE partition = ?"
    found = []
    for producer_id, epoch, recent, open_from, seen_ms in db.execute(query, (partition_id,)):
        sent = ProducerState.unpacked(epoch, recent, open_from, seen_ms).recent
        last = sent[-1][1] if sent else -1
        found.append(ActiveProducer(producer_id, epoch, last, seen_ms, -1, -1 if open_from is None else open_from))
    return tuple(found)


@contextlib.contextmanager
def _snapshot(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")


def _read(db: sqlite3.Connection, want: ReadRequest, bytes_max: int, *, first: bool) -> tuple[bytes, int]:
    """Batches, and the offset at which they end. With `first`, the first one may be larger than the bound."""
    end = want.offset
    if bytes_max <= 0 and not first:
        return b"", end
    at = position(want.partition_id, want.offset)
    rows = db.execute(
        "SELECT position, last_offset, payload FROM batches WHERE position < :before AND position >= coalesce("
        " (SELECT max(position) FROM batches WHERE position BETWEEN :begin AND :at), :at) ORDER BY position",
        {
            "before": position(want.partition_id, want.before),
            "begin": position(want.partition_id, 0),
            "at": at,
        },
    )
    found: list[bytes] = []
    size = 0
    for row_id, last_offset, payload in rows:
        error = fault(offset_of(row_id), last_offset, payload)
        if error is not None:
            raise Damaged(f"partition {want.partition_id}, offset {offset_of(row_id)}: {error}")
        if last_offset < want.offset:
            continue
        size += len(payload)
        if size > bytes_max and (found or not first):
            break
        found.append(payload)
        end = last_offset + 1
        if size >= bytes_max:
            break
    return b"".join(found), end


def _aborted(db: sqlite3.Connection, want: ReadRequest, end: int) -> tuple[AbortedTransaction, ...]:
    """The aborted transactions with records between `want.offset` and `end`."""
    query = (
        "SELECT producer_id, first_offset FROM aborted"
        " WHERE partition = ? AND last_offset >= ? AND first_offset < ? ORDER BY first_offset"
    )
    return tuple(AbortedTransaction(*row) for row in db.execute(query, (want.partition_id, want.offset, end)))


def _first_reaching(db: sqlite3.Connection, partition_id: int, start: int, end: int, timestamp: int) -> int:
    """Bisect for the first batch by which the log had reached `timestamp`; that value only grows along the log."""
    query = (
        "SELECT position, reached_timestamp FROM batches WHERE position >= ? AND position < ? ORDER BY position LIMIT 1"
    )
    while start < end:
        middle = (start + end) // 2
        row = db.execute(query, (position(partition_id, middle), position(partition_id, end))).fetchone()
        if row is None or row[1] >= timestamp:
            end = middle
        else:
            start = offset_of(row[0]) + 1
    return start
