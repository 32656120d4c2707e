"""Write operations on the logs of partitions: assignment of offsets, transaction markers, and recognition of repeated
batches.

All methods run in the writer's thread, inside of the writer's transaction. The state in memory is a cache of the file:
`flush` writes it before a commit, and `reload` reads it after a rollback.

A client has at most five batches in flight, so the last five batches of each producer are remembered, as in Kafka.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_broker.batch import NO_PRODUCER, RecordBatch, build_transaction_marker
from headrace_broker.errors import Code, Rejected
from headrace_broker.store_format import OFFSET_MAX, position

_PRODUCERS_CACHED = 10_000


@dataclass(slots=True)
class PartitionLog:
    """State of a partition's log. `open` contains the first offset of each open transaction by producer id."""

    id: int
    topic: str
    number: int
    start: int
    end: int
    bytes: int
    max_timestamp: int
    open: dict[int, int] = field(default_factory=dict)

    @property
    def stable(self) -> int:
        """Last stable offset: each transaction with records before it is committed or aborted."""
        return min(self.open.values(), default=self.end)


class AppendResult(NamedTuple):
    """Offset at which a batch is stored, and the first offset of the log."""

    base_offset: int
    log_start: int


class PartitionMoved(NamedTuple):
    """New state of a partition's log after a commit. The writer passes it to the event loop."""

    id: int
    start: int
    end: int
    stable: int
    bytes: int


class Log:
    """The logs of all partitions. Batches are added only by `append` and `end_transaction`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._partitions: dict[int, PartitionLog] = {}
        self._producers: OrderedDict[tuple[int, int], ProducerState] = OrderedDict()
        self._moved: set[int] = set()
        self._changed_producers: set[tuple[int, int]] = set()
        self.reload()

    def reload(self) -> None:
        """Read the committed state of all logs from the file again."""
        query = "SELECT id, topic, number, log_start, log_end, bytes, max_timestamp FROM partitions"
        self._partitions = {row[0]: PartitionLog(*row) for row in self._db.execute(query)}
        self._producers.clear()
        self._moved.clear()
        self._changed_producers.clear()
        query = "SELECT partition, producer_id, open_from FROM producers WHERE open_from IS NOT NULL"
        for partition_id, producer_id, open_from in self._db.execute(query):
            self._partitions[partition_id].open[producer_id] = open_from

    def flush(self) -> list[PartitionMoved]:
        """Write the changes since the last commit to the file. Return the new states of the changed partitions."""
        partitions = [self._partitions[key] for key in self._moved if key in self._partitions]
        self._db.executemany(
            "UPDATE partitions SET log_start = ?, log_end = ?, bytes = ?, max_timestamp = ? WHERE id = ?",
            [(p.start, p.end, p.bytes, p.max_timestamp, p.id) for p in partitions],
        )
        self._save_producers()
        self._moved.clear()
        while len(self._producers) > _PRODUCERS_CACHED:
            self._producers.popitem(last=False)
        return [_moved(partition) for partition in partitions]

    def states(self) -> list[PartitionMoved]:
        """Return the states of all partitions, from which the event loop builds its catalog at the start."""
        return [_moved(partition) for partition in self._partitions.values()]

    def partition(self, partition_id: int) -> PartitionLog:
        """Return the state of a partition. Raises `Rejected` with error code 3 if its topic was deleted."""
        try:
            return self._partitions[partition_id]
        except KeyError:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, "the topic was deleted") from None

    def partitions(self) -> Iterable[PartitionLog]:
        """Return all partitions."""
        return self._partitions.values()

    def add(self, topic: str, number: int) -> PartitionLog:
        """Create an empty partition."""
        row = self._db.execute("INSERT INTO partitions (topic, number) VALUES (?, ?)", (topic, number))
        assert row.lastrowid is not None
        partition = self._partitions[row.lastrowid] = PartitionLog(row.lastrowid, topic, number, 0, 0, 0, -1)
        return partition

    def drop(self, partition_id: int) -> None:
        """Remove a partition from memory and from the table of partitions. Maintenance deletes its batches later."""
        self._partitions.pop(partition_id, None)
        for key in [key for key in self._producers if key[0] == partition_id]:
            del self._producers[key]
            self._changed_producers.discard(key)
        self._db.execute("DELETE FROM partitions WHERE id = ?", (partition_id,))
        self._db.execute("DELETE FROM producers WHERE partition = ?", (partition_id,))
        self._db.execute("DELETE FROM aborted WHERE partition = ?", (partition_id,))

    def append(self, partition_id: int, batch: RecordBatch, now_ms: int) -> AppendResult:
        """Store a batch at the end of a log, unless the same batch is already stored.

        Returns:
            The offset at which the batch is stored, and the first offset of the log.

        Raises:
            Rejected: the batch is refused, and nothing was written.
        """
        partition = self.partition(partition_id)
        if batch.producer_id == NO_PRODUCER:
            return AppendResult(self._store(partition, batch, now_ms), partition.start)
        producer = self.producer(partition_id, batch.producer_id)
        if producer is not None:
            stored_offset = producer.duplicate_of(batch)
            if stored_offset is not None:
                return AppendResult(stored_offset, partition.start)
        offset = self._store(partition, batch, now_ms)
        key = (partition_id, batch.producer_id)
        producer = self._producers.setdefault(key, producer or ProducerState(batch.producer_epoch))
        producer.note(batch, offset, now_ms)
        self._changed_producers.add(key)
        if producer.open_from is not None:
            partition.open[batch.producer_id] = producer.open_from
        return AppendResult(offset, partition.start)

    def producer(self, partition_id: int, producer_id: int) -> ProducerState | None:
        """Return the state of a producer in a partition, or None if it has not written there."""
        key = (partition_id, producer_id)
        state = self._producers.get(key)
        if state is not None:
            self._producers.move_to_end(key)
            return state
        query = "SELECT epoch, recent, open_from, seen_ms FROM producers WHERE partition = ? AND producer_id = ?"
        row = self._db.execute(query, key).fetchone()
        if row is not None:
            self._producers[key] = state = ProducerState.unpacked(*row)
        return state

    def end_transaction(self, partition_id: int, producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> None:
        """Write a transaction marker, if the producer's open transaction has records in the partition."""
        partition = self._partitions.get(partition_id)
        if partition is None or producer_id not in partition.open:
            return
        first = partition.open[producer_id]
        control = build_transaction_marker(committed=commit, producer_id=producer_id, epoch=epoch, timestamp_ms=now_ms)
        offset = self._store(partition, control, now_ms)
        if not commit:
            self._db.execute("INSERT INTO aborted VALUES (?, ?, ?, ?)", (partition_id, offset, first, producer_id))
        del partition.open[producer_id]
        producer = self.producer(partition_id, producer_id)
        assert producer is not None
        producer.open_from = None
        self._changed_producers.add((partition_id, producer_id))

    def touch(self, partition: PartitionLog) -> None:
        """Mark the partition as changed for the next `flush`."""
        self._moved.add(partition.id)

    def forget_producers(self, before_ms: int) -> None:
        """Delete the state of producers that have stored no batch since `before_ms`.

        If such a producer repeats a batch afterwards, the batch is stored twice.
        """
        self._save_producers()  # so that a producer which becomes active in this transaction stays
        statement = "DELETE FROM producers WHERE open_from IS NULL AND seen_ms < ? RETURNING partition, producer_id"
        for key in self._db.execute(statement, (before_ms,)).fetchall():
            self._producers.pop(key, None)

    def _save_producers(self) -> None:
        changed = [(key, self._producers[key]) for key in self._changed_producers]
        self._db.executemany(
            "INSERT OR REPLACE INTO producers VALUES (?, ?, ?, ?, ?, ?)",
            [(*key, state.epoch, state.packed(), state.open_from, state.seen_ms) for key, state in changed],
        )
        self._changed_producers.clear()

    def _store(self, partition: PartitionLog, batch: RecordBatch, now_ms: int) -> int:
        offset = partition.end
        if offset + batch.last_offset_delta >= OFFSET_MAX:
            raise Rejected(Code.POLICY_VIOLATION, f"{partition.topic} {partition.number} has no offsets left")
        payload = batch.with_base_offset(offset)
        timestamp = batch.max_timestamp if batch.max_timestamp >= 0 else now_ms  # retention needs one
        partition.max_timestamp = max(partition.max_timestamp, timestamp)
        self._db.execute(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?)",
            (
                position(partition.id, offset),
                offset + batch.last_offset_delta,
                timestamp,
                partition.max_timestamp,
                payload,
            ),
        )
        partition.end = offset + batch.last_offset_delta + 1
        partition.bytes += len(payload)
        self._moved.add(partition.id)
        return offset


def _moved(partition: PartitionLog) -> PartitionMoved:
    return PartitionMoved(partition.id, partition.start, partition.end, partition.stable, partition.bytes)


REMEMBERED = 5
SEQUENCES = 1 << 31
"""Number of sequence numbers, which count from 0 and wrap around."""
_SENT = struct.Struct(">iiq")


@dataclass(slots=True)
class ProducerState:
    """State of one idempotent producer in one partition, from which repeated and missing batches are detected.

    `open_from` is the first offset of the producer's open transaction, or None if it has none.
    """

    epoch: int
    recent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """First sequence number, last sequence number and base offset of the last batches, oldest first."""
    open_from: int | None = None
    seen_ms: int = 0

    def duplicate_of(self, batch: RecordBatch) -> int | None:
        """Return the base offset of an earlier copy of the batch, or None if it is the producer's next batch.

        Raises `Rejected` for an old epoch (47) and for a gap in the sequence numbers (45).
        """
        if batch.producer_epoch < self.epoch:
            raise Rejected(Code.INVALID_PRODUCER_EPOCH, f"epoch {batch.producer_epoch} is fenced by epoch {self.epoch}")
        first, last = sequence_range(batch)
        if batch.producer_epoch > self.epoch:
            if first != 0:
                raise Rejected(Code.OUT_OF_ORDER_SEQUENCE, f"sequence {first}: a new epoch must begin at 0")
            return None
        for stored_first, stored_last, offset in self.recent:
            if (stored_first, stored_last) == (first, last):
                return offset
        expected = (self.recent[-1][1] + 1) % SEQUENCES if self.recent else first
        if first != expected:
            raise Rejected(Code.OUT_OF_ORDER_SEQUENCE, f"sequence {first}, expected {expected}")
        return None

    def note(self, batch: RecordBatch, offset: int, now_ms: int) -> None:
        """Add a batch of the producer, which was stored at `offset`, to the state.

        A batch with a new epoch replaces the batches in `recent`. The first batch of a transaction sets `open_from`.
        """
        if batch.producer_epoch != self.epoch:
            self.epoch = batch.producer_epoch
            self.recent.clear()
        self.recent.append((*sequence_range(batch), offset))
        self.seen_ms = now_ms
        if batch.transactional and self.open_from is None:
            self.open_from = offset

    def packed(self) -> bytes:
        """Encode `recent` as bytes, for the column of the file."""
        return b"".join(_SENT.pack(*sent) for sent in self.recent)

    @classmethod
    def unpacked(cls, epoch: int, recent: bytes, open_from: int | None, seen_ms: int) -> ProducerState:
        """Return a producer's state from the columns of its stored row, with `recent` as `packed` encodes it."""
        return cls(epoch, deque(_SENT.iter_unpack(recent), REMEMBERED), open_from, seen_ms)


def sequence_range(batch: RecordBatch) -> tuple[int, int]:
    """Return the first and the last sequence number of a batch."""
    return batch.base_sequence, (batch.base_sequence + batch.last_offset_delta) % SEQUENCES
