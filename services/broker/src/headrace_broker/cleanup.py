"""Cleanup of logs by retention and by compaction: functions that find out what to delete, and `Upkeep`, which deletes
it.

`Upkeep` runs in the writer's thread. The functions run in a reader's thread.

Retention deletes the batches that exceed the topic's maximum age or size. Compaction keeps only the latest record of
each key. A compaction pass covers the offsets [start, limit). It first finds the latest offset of each key among the
records that were added since the last pass (`index`), and then drops older records of these keys from the complete
range (`rewrite`). The limit is before the last batch, so that readers can always reach the end of the log. Each call of
`index` and `rewrite` processes a few batches.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_broker.batch import GZIP, NONE, RawRecord, RecordBatch, compress_gzip, parse, records
from headrace_broker.errors import Damaged, Malformed
from headrace_broker.inspection import batch_problem
from headrace_broker.log import Log
from headrace_broker.store_format import offset_of, partition_of, position
from headrace_broker.topic_config import TopicConfig

_STEP_ROWS = 500
_RETENTION_STEP_BYTES = 8 * 1024 * 1024
"""Maximum number of bytes that one commit deletes, so that producers wait only briefly."""


class LogBounds(NamedTuple):
    """First offset, last stable offset and size in bytes of a partition's log."""

    partition_id: int
    start: int
    stable: int
    bytes: int


def retention_offset(db: sqlite3.Connection, log: LogBounds, config: TopicConfig, now_ms: int) -> int:
    """Return the offset before which the topic's retention deletes records now; `log.start` if it deletes none.

    Call it again after the deletion, because a step is limited. As in Kafka, only the beginning of a log is deleted: a
    batch stays while an earlier one stays, whatever its age.
    """
    oldest_ms = now_ms - config.retention_ms if config.retention_ms >= 0 else None
    excess = log.bytes - config.retention_bytes if config.retention_bytes >= 0 else 0
    rows = db.execute(
        "SELECT last_offset, max_timestamp, length(payload) FROM batches WHERE position >= ? AND position < ?"
        " ORDER BY position LIMIT ?",
        (position(log.partition_id, log.start), position(log.partition_id, log.stable), _STEP_ROWS),
    )
    cut, cut_bytes = log.start, 0
    for last_offset, timestamp, size in rows:
        too_old = oldest_ms is not None and timestamp < oldest_ms
        if not (too_old or excess >= size) or cut_bytes > _RETENTION_STEP_BYTES:
            break
        cut = last_offset + 1
        excess -= size
        cut_bytes += size
    return cut


def first_younger(db: sqlite3.Connection, partition_id: int, start: int, limit: int, timestamp: int) -> int:
    """Return the base offset of the first batch in [start, limit) with a record after `timestamp`, or `limit`."""
    row = db.execute(
        "SELECT position FROM batches WHERE position >= ? AND position < ? AND max_timestamp > ?"
        " ORDER BY position LIMIT 1",
        (position(partition_id, start), position(partition_id, limit), timestamp),
    ).fetchone()
    return limit if row is None else offset_of(row[0])


def deleted_partition(db: sqlite3.Connection) -> int | None:
    """Return the id of a partition that belongs to a deleted topic and still has batches, or None."""
    existing = {row[0] for row in db.execute("SELECT id FROM partitions")}
    at = 0
    query = "SELECT position FROM batches WHERE position >= ? ORDER BY position LIMIT 1"
    while row := db.execute(query, (at,)).fetchone():
        partition_id = partition_of(row[0])
        if partition_id not in existing:
            return partition_id
        at = position(partition_id + 1, 0)
    return None


def last_batch(db: sqlite3.Connection, partition_id: int) -> int | None:
    """Return the base offset of the last batch of a partition, or None if it has none."""
    query = "SELECT max(position) FROM batches WHERE position >= ? AND position < ?"
    (row_id,) = db.execute(query, (position(partition_id, 0), position(partition_id + 1, 0))).fetchone()
    return None if row_id is None else offset_of(row_id)


_COMPACTION_STEP_BYTES = 64 * 1024
"""Number of bytes that one step reads. Compressed records may expand to many times that."""


class Replacement(NamedTuple):
    """New content of the batch at `base_offset`. If `payload` is None, the batch is deleted."""

    base_offset: int
    payload: bytes | None


@dataclass(slots=True)
class CompactionPass:
    """State of one compaction pass over one partition."""

    partition_id: int
    start: int
    limit: int
    at: int
    """Offset of the next batch to read. `index` begins where the last pass ended, `rewrite` at `start`."""
    tombstones_before_ms: int
    """Time in milliseconds. Older tombstones are dropped, because all readers have had time to read them."""
    keys_max: int
    newest: dict[bytes, int] = field(default_factory=dict)
    aborted: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """First and last offsets of aborted transactions by producer id."""
    kept_bytes: int = 0

    def is_aborted(self, batch: RecordBatch) -> bool:
        """Return whether the batch belongs to an aborted transaction."""
        spans = self.aborted.get(batch.producer_id, ()) if batch.transactional else ()
        return any(first <= batch.base_offset <= last for first, last in spans)

    def must_keep(self, record: RawRecord) -> bool:
        """Return whether compaction keeps the record.

        It keeps records without a key, and the latest record of each key unless that is an old tombstone.
        """
        if record.key is None:
            return True
        if self.newest.get(_digest(record.key), -1) > record.offset:
            return False
        return not (record.tombstone and record.timestamp < self.tombstones_before_ms)


def progress(db: sqlite3.Connection, partition_id: int) -> tuple[int, int]:
    """Return the progress of compaction in a partition, as the last complete pass stored it with `Upkeep.record_pass`.

    Returns:
        The offset before which the log is compacted, and the size of the compacted batches in bytes.
    """
    row = db.execute("SELECT cleaned_to, clean_bytes FROM partitions WHERE id = ?", (partition_id,)).fetchone()
    return row or (0, 0)


def begin(db: sqlite3.Connection, work: CompactionPass) -> None:
    """Prepare a compaction pass: load the partition's aborted transactions, because their records are dropped."""
    query = "SELECT producer_id, first_offset, last_offset FROM aborted WHERE partition = ? AND first_offset < ?"
    for producer_id, first, last in db.execute(query, (work.partition_id, work.limit)):
        work.aborted.setdefault(producer_id, []).append((first, last))


def index(db: sqlite3.Connection, work: CompactionPass) -> bool:
    """Find the latest offset of each key in the next batches of a pass. Return False if the limit has been reached.

    If there are too many keys for the memory of one pass, the limit of the pass is lowered.
    """
    batches = _next(db, work)
    for batch in batches:
        if len(work.newest) >= work.keys_max:
            work.limit = batch.base_offset
            return False
        work.at = batch.last_offset + 1
        if batch.control or work.is_aborted(batch):
            continue
        with_keys = (record for record in _records(batch) or () if record.key is not None)
        work.newest.update((_digest(record.key), record.offset) for record in with_keys if record.key is not None)
    return bool(batches)


def rewrite(db: sqlite3.Connection, work: CompactionPass) -> list[Replacement] | None:
    """Compact the next batches of a pass. Return the new content of each batch that changes, or None at the end of the
    pass."""
    batches = _next(db, work)
    changes = []
    for batch in batches:
        work.at = batch.last_offset + 1
        payload = _rewritten(work, batch)
        work.kept_bytes += len(payload or b"")
        if payload is not batch.raw:
            changes.append(Replacement(batch.base_offset, payload))
    return changes if batches else None


def _rewritten(work: CompactionPass, batch: RecordBatch) -> bytes | None:
    raw = batch.raw
    assert isinstance(raw, bytes)
    if batch.control or work.is_aborted(batch):
        return None  # markers are dropped: aborted records are dropped, and readers ignore commit markers
    all_records = _records(batch)
    if all_records is None:
        return raw
    remaining = [record for record in all_records if work.must_keep(record)]
    if len(remaining) == batch.count:
        return raw
    if not remaining:
        return None
    body = b"".join(record.raw for record in remaining)
    codec = NONE if batch.codec == NONE else GZIP
    return batch.with_records(compress_gzip(body) if codec == GZIP else body, len(remaining), codec)


def _next(db: sqlite3.Connection, work: CompactionPass) -> list[RecordBatch]:
    """Return the next batches of a pass, about `_COMPACTION_STEP_BYTES` together. Raises `Damaged`."""
    rows = db.execute(
        "SELECT position, last_offset, payload FROM batches WHERE position >= ? AND position < ? ORDER BY position",
        (position(work.partition_id, work.at), position(work.partition_id, work.limit)),
    )
    batches: list[RecordBatch] = []
    size = 0
    for row_id, last_offset, payload in rows:
        error = batch_problem(offset_of(row_id), last_offset, payload)
        if error is not None:  # a rewritten batch would get a valid checksum
            raise Damaged(f"partition {work.partition_id}, offset {offset_of(row_id)}: {error}")
        batches.append(parse(payload))
        size += len(payload)
        if size >= _COMPACTION_STEP_BYTES:
            break
    rows.close()
    return batches


def _records(batch: RecordBatch) -> list[RawRecord] | None:
    """Return the records of a batch, or None if its body cannot be read."""
    try:
        return list(records(batch))
    except Malformed:
        return None


def _digest(key: memoryview) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


_FREE_PAGES_KEPT = 4_000
"""Number of free pages that stay in the file for reuse. If there are more, and they are more than a quarter of the
file, the file is truncated."""


class Upkeep:
    """Write operations of maintenance. Each takes a short time, and must be submitted to the writer."""

    def __init__(self, db: sqlite3.Connection, log: Log) -> None:
        self._db = db
        self._log = log

    def cut(self, partition_id: int, before: int) -> int:
        """Delete the batches before the offset `before`, and return the number of freed bytes.

        A batch that contains the offset stays. Raises `Rejected` with error code 3 if the partition was deleted.
        """
        partition = self._log.partition(partition_id)
        if before <= partition.start:
            return 0
        span = (position(partition_id, 0), position(partition_id, before), before)
        query = (
            "SELECT coalesce(sum(length(payload)), 0) FROM batches"
            " WHERE position >= ? AND position < ? AND last_offset < ?"
        )
        freed = int(self._db.execute(query, span).fetchone()[0])
        self._db.execute("DELETE FROM batches WHERE position >= ? AND position < ? AND last_offset < ?", span)
        self._db.execute("DELETE FROM aborted WHERE partition = ? AND last_offset < ?", (partition_id, before))
        statement = "UPDATE partitions SET clean_bytes = max(clean_bytes - ?, 0) WHERE id = ?"
        self._db.execute(statement, (freed, partition_id))
        partition.start = before
        partition.bytes -= freed
        self._log.touch(partition)
        return freed

    def replace(self, partition_id: int, changes: Iterable[Replacement]) -> int:
        """Replace batches by their compacted form. Return the number of freed bytes."""
        partition = self._log.partition(partition_id)
        saved = 0
        for base_offset, payload in changes:
            at = position(partition_id, base_offset)
            row = self._db.execute("SELECT length(payload) FROM batches WHERE position = ?", (at,)).fetchone()
            if row is None:
                continue  # retention has deleted the batch
            if payload is None:
                self._db.execute("DELETE FROM batches WHERE position = ?", (at,))
                # The entry of an aborted transaction is deleted together with its marker.
                self._db.execute(
                    "DELETE FROM aborted WHERE partition = ? AND last_offset = ?", (partition_id, base_offset)
                )
            else:
                self._db.execute("UPDATE batches SET payload = ? WHERE position = ?", (payload, at))
            saved += row[0] - len(payload or b"")
        partition.bytes -= saved
        self._log.touch(partition)
        return saved

    def record_pass(self, partition_id: int, upto: int, kept_bytes: int) -> None:
        """Store the progress of compaction in a partition after a complete pass, for `progress`.

        Args:
            partition_id: the partition.
            upto: limit of the pass: the offset before which the log is now compacted.
            kept_bytes: size of the batches before `upto` after the pass.
        """
        statement = "UPDATE partitions SET cleaned_to = ?, clean_bytes = ? WHERE id = ?"
        self._db.execute(statement, (upto, kept_bytes, partition_id))

    def touch(self) -> None:
        """Write a row without changing it. If the commit succeeds, commits are possible again."""
        self._db.execute("UPDATE meta SET value = value WHERE name = 'cluster_id'")

    def purge(self, partition_id: int) -> int:
        """Delete up to 500 batches of a partition whose topic was deleted. Return their number."""
        statement = (
            "DELETE FROM batches WHERE position IN"
            " (SELECT position FROM batches WHERE position >= ? AND position < ? LIMIT 500)"
        )
        return self._db.execute(statement, (position(partition_id, 0), position(partition_id + 1, 0))).rowcount

    def shrink(self) -> bool:
        """Return free pages at the end of the file to the operating system if there are many. Return whether there may
        be more."""
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        pages: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        if free < max(pages // 4, _FREE_PAGES_KEPT):
            return False
        self._db.execute("PRAGMA incremental_vacuum(1000)").fetchall()
        return True
