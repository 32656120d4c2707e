"""Read operations on the broker's file: batches with aborted transactions, offsets, and states of producers.

The functions run in a reader thread with its own connection, and see only committed data.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from headrace_broker.batch import parse, records
from headrace_broker.errors import Code, Damaged, Malformed, Rejected
from headrace_broker.inspection import batch_problem, is_damage
from headrace_broker.log import ProducerState
from headrace_broker.protocol.fetch import AbortedTransaction
from headrace_broker.protocol.transactions import ActiveProducer
from headrace_broker.store import Store
from headrace_broker.store_format import offset_of, position

P = ParamSpec("P")
T = TypeVar("T")


class ReadRequest(NamedTuple):
    """Read of one partition's log: batches from the one that contains `offset` up to the offset `before`, at most
    `bytes_max` bytes."""

    partition_id: int
    offset: int
    before: int
    bytes_max: int
    read_committed: bool


class ReadResult(NamedTuple):
    """Batches that a `ReadRequest` has read. `aborted` are the aborted transactions among them, or None if the request
    is not `read_committed`."""

    records: bytes
    aborted: tuple[AbortedTransaction, ...] | None


def read_batches(db: sqlite3.Connection, requests: Sequence[ReadRequest], bytes_max: int) -> list[ReadResult]:
    """Read the batches for each request, in one snapshot of the file. Together they have at most `bytes_max` bytes,
    unless the first batch alone is larger."""
    results = []
    left = bytes_max
    with _snapshot(db):
        for request in requests:
            data, end = _read(db, request, min(left, request.bytes_max), first=left == bytes_max)
            left = max(left - len(data), 0)
            results.append(ReadResult(data, _aborted(db, request, end) if request.read_committed else None))
    return results


def offset_at_time(db: sqlite3.Connection, partition_id: int, start: int, end: int, timestamp: int) -> tuple[int, int]:
    """Return offset and time of the first record in the offsets [start, end) at or after `timestamp`, or (-1, -1)."""
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
            except Malformed:  # an unreadable compressed batch counts as one record
                return batch.base_offset, batch.max_timestamp
    return -1, -1


def read_committed_offsets(
    db: sqlite3.Connection, group_id: str
) -> tuple[dict[tuple[str, int], tuple[int, str | None]], Set[tuple[str, int]]]:
    """Return a group's committed offsets with their metadata, by topic and partition, and the partitions for which open
    transactions have pending offsets."""
    query = "SELECT topic, partition, committed, metadata FROM offsets WHERE group_id = ? ORDER BY topic, partition"
    pending = "SELECT topic, partition FROM pending_offsets WHERE group_id = ?"
    with _snapshot(db):
        offsets = {(row[0], row[1]): (row[2], row[3]) for row in db.execute(query, (group_id,))}
        return offsets, set(db.execute(pending, (group_id,)))


def read_producers(db: sqlite3.Connection, partition_id: int) -> tuple[ActiveProducer, ...]:
    """Return the state of each producer that has written to a partition."""
    query = "SELECT producer_id, epoch, recent, open_from, seen_ms FROM producers WHERE partition = ?"
    active = []
    for producer_id, epoch, recent, open_from, seen_ms in db.execute(query, (partition_id,)):
        sent = ProducerState.unpacked(epoch, recent, open_from, seen_ms).recent
        last = sent[-1][1] if sent else -1
        active.append(ActiveProducer(producer_id, epoch, last, seen_ms, -1, -1 if open_from is None else open_from))
    return tuple(active)


@contextlib.contextmanager
def _snapshot(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")


def _read(db: sqlite3.Connection, request: ReadRequest, bytes_max: int, *, first: bool) -> tuple[bytes, int]:
    """Read the batches of one request. Return their bytes and the offset after them. If `first`, one batch is read even
    if it exceeds `bytes_max`."""
    end = request.offset
    if bytes_max <= 0 and not first:
        return b"", end
    at = position(request.partition_id, request.offset)
    rows = db.execute(
        "SELECT position, last_offset, payload FROM batches WHERE position < :before AND position >= coalesce("
        " (SELECT max(position) FROM batches WHERE position BETWEEN :begin AND :at), :at) ORDER BY position",
        {
            "before": position(request.partition_id, request.before),
            "begin": position(request.partition_id, 0),
            "at": at,
        },
    )
    payloads: list[bytes] = []
    size = 0
    for row_id, last_offset, payload in rows:
        error = batch_problem(offset_of(row_id), last_offset, payload)
        if error is not None:
            raise Damaged(f"partition {request.partition_id}, offset {offset_of(row_id)}: {error}")
        if last_offset < request.offset:
            continue
        size += len(payload)
        if size > bytes_max and (payloads or not first):
            break
        payloads.append(payload)
        end = last_offset + 1
        if size >= bytes_max:
            break
    return b"".join(payloads), end


def _aborted(db: sqlite3.Connection, request: ReadRequest, end: int) -> tuple[AbortedTransaction, ...]:
    """Return the aborted transactions with records between `request.offset` and `end`."""
    query = (
        "SELECT producer_id, first_offset FROM aborted"
        " WHERE partition = ? AND last_offset >= ? AND first_offset < ? ORDER BY first_offset"
    )
    return tuple(AbortedTransaction(*row) for row in db.execute(query, (request.partition_id, request.offset, end)))


def _first_reaching(db: sqlite3.Connection, partition_id: int, start: int, end: int, timestamp: int) -> int:
    """Return the base offset of the first batch that contains a record at or after `timestamp`, by bisection.

    Bisection is possible because each batch is stored with the latest time of all records up to it, which never
    decreases.
    """
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


class Readers:
    """Pool of `count` threads with a connection each. If a read fails, `Rejected` with STORAGE_ERROR is raised."""

    def __init__(self, store: Store, count: int) -> None:
        self._connections: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for _ in range(count):
            self._connections.put(store.connect())
        self._count = count
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with `Damaged` if the file is damaged. Then the process must end."""
        self._pool = ThreadPoolExecutor(count, "reader")

    async def run(self, read: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `read` with a connection in one of the threads, and return its result."""

        def work() -> T:
            db = self._connections.get_nowait()
            try:
                return read(db, *args, **kwargs)
            finally:
                self._connections.put(db)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except Damaged as error:
            self._report_damage(error)
            raise Rejected(Code.STORAGE_ERROR, str(error)) from error
        except sqlite3.Error as error:
            if is_damage(error):
                self._report_damage(Damaged(f"the broker's file: {error}"))
            raise Rejected(Code.STORAGE_ERROR, f"the broker's file: {error}") from error

    def _report_damage(self, error: Damaged) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks it as retrieved, so that asyncio does not warn

    def close(self) -> None:
        """Wait until running reads end, and close the connections."""
        self._pool.shutdown()
        for _ in range(self._count):
            self._connections.get_nowait().close()
