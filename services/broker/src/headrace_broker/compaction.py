"""Log compaction: of the records with one key, the newest stays. Reads and computes; `Log.replace` writes.

A pass works through [start, limit): it first notes the newest offset of each key in the part that is new since the last
pass, then drops every older record of those keys from the whole of it. The limit lies before the last batch, so that
the log's end can always be reached by reading. `index` and `rewrite` do a step each and say when they are through.
"""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_broker.batch import RecordBatch, parse
from headrace_broker.compression import GZIP, NONE, gzipped
from headrace_broker.errors import Damaged, Malformed
from headrace_broker.inspection import fault
from headrace_broker.records import RawRecord, records
from headrace_broker.store_format import offset_of, position

_STEP_BYTES = 64 * 1024
"""What is read at a time; with compressed records it may become many times that."""


class Replacement(NamedTuple):
    """A batch to write in the place of the one at `base_offset`; None to delete it."""

    base_offset: int
    payload: bytes | None


@dataclass(slots=True)
class Pass:
    """One pass over a partition. `at` is the next offset to look at."""

    partition_id: int
    start: int
    limit: int
    at: int
    """At first where the last pass ended, later the start."""
    tombstones_before_ms: int
    """Deletion marks older than this have been there long enough for every reader to see."""
    keys_max: int
    newest: dict[bytes, int] = field(default_factory=dict)
    aborted: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """First and last offsets of aborted transactions, by producer id."""
    kept_bytes: int = 0

    def is_aborted(self, batch: RecordBatch) -> bool:
        spans = self.aborted.get(batch.producer_id, ()) if batch.transactional else ()
        return any(first <= batch.base_offset <= last for first, last in spans)

    def keeps(self, record: RawRecord) -> bool:
        if record.key is None:
            return True
        if self.newest.get(_digest(record.key), -1) > record.offset:
            return False
        return not (record.tombstone and record.timestamp < self.tombstones_before_ms)


def progress(db: sqlite3.Connection, partition_id: int) -> tuple[int, int]:
    """Where the last pass ended, and how many bytes it left."""
    row = db.execute("SELECT cleaned_to, clean_bytes FROM partitions WHERE id = ?", (partition_id,)).fetchone()
    return row or (0, 0)


def begin(db: sqlite3.Connection, work: Pass) -> None:
    """Look up what was aborted."""
    query = "SELECT producer_id, first_offset, last_offset FROM aborted WHERE partition = ? AND first_offset < ?"
    for producer_id, first, last in db.execute(query, (work.partition_id, work.limit)):
        work.aborted.setdefault(producer_id, []).append((first, last))


def index(db: sqlite3.Connection, work: Pass) -> bool:
    """Note the newest offset of some more keys; False when through. Too many for one pass, and it ends before them."""
    batches = _next(db, work)
    for batch in batches:
        if len(work.newest) >= work.keys_max:
            work.limit = batch.base_offset
            return False
        work.at = batch.last_offset + 1
        if batch.control or work.is_aborted(batch):
            continue
        found = _records(batch) or []
        work.newest.update((_digest(record.key), record.offset) for record in found if record.key is not None)
    return bool(batches)


def rewrite(db: sqlite3.Connection, work: Pass) -> list[Replacement] | None:
    """What becomes of some more batches, but for those that stay as they are; None when through."""
    batches = _next(db, work)
    changes = []
    for batch in batches:
        work.at = batch.last_offset + 1
        payload = _rewritten(work, batch)
        work.kept_bytes += len(payload or b"")
        if payload is not batch.raw:
            changes.append(Replacement(batch.base_offset, payload))
    return changes if batches else None


def _rewritten(work: Pass, batch: RecordBatch) -> bytes | None:
    raw = batch.raw
    assert isinstance(raw, bytes)
    if batch.control or work.is_aborted(batch):
        return None  # with an aborted transaction's records goes its marker; a commit's marker tells readers nothing
    found = _records(batch)
    if found is None:
        return raw
    kept = [record for record in found if work.keeps(record)]
    if len(kept) == batch.count:
        return raw
    if not kept:
        return None
    body = b"".join(record.raw for record in kept)
    codec = NONE if batch.codec == NONE else GZIP
    return batch.with_records(gzipped(body) if codec == GZIP else body, len(kept), codec)


def _next(db: sqlite3.Connection, work: Pass) -> list[RecordBatch]:
    """The next batches below the limit; none when it is reached."""
    rows = db.execute(
        "SELECT position, last_offset, payload FROM batches WHERE position >= ? AND position < ? ORDER BY position",
        (position(work.partition_id, work.at), position(work.partition_id, work.limit)),
    )
    found: list[RecordBatch] = []
    size = 0
    for row_id, last_offset, payload in rows:
        error = fault(offset_of(row_id), last_offset, payload)
        if error is not None:  # written again, it would get a checksum that fits
            raise Damaged(f"partition {work.partition_id}, offset {offset_of(row_id)}: {error}")
        found.append(parse(payload))
        size += len(payload)
        if size >= _STEP_BYTES:
            break
    rows.close()
    return found


def _records(batch: RecordBatch) -> list[RawRecord] | None:
    """None for a body that cannot be read; it is left alone."""
    try:
        return list(records(batch))
    except Malformed:
        return None


def _digest(key: memoryview) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()
