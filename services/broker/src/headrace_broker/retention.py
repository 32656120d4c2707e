"""Selection of batches that exceed the retention time or size. `Upkeep.cut` deletes them."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from headrace_broker.store_format import offset_of, partition_of, position
from headrace_broker.topic_config import TopicConfig

_STEP_ROWS = 500
_STEP_BYTES = 8 * 1024 * 1024
"""Maximum number of bytes that one commit deletes, so that producers hardly wait."""


class Bounds(NamedTuple):
    """First offset, last stable offset and size of a partition's log."""

    partition_id: int
    start: int
    stable: int
    bytes: int


def expired(db: sqlite3.Connection, log: Bounds, config: TopicConfig, now_ms: int) -> int:
    """Return the offset below which the log must be cut now, or `log.start`. Call it again after cutting.

    As in Kafka only a prefix of the log is deleted: a batch stays as long as an earlier one stays, whatever its age.
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
        if not (too_old or excess >= size) or cut_bytes > _STEP_BYTES:
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
    """Return a partition of a deleted topic that still has batches, or None."""
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
    """Return the base offset of the last batch in a partition, or None."""
    query = "SELECT max(position) FROM batches WHERE position >= ? AND position < ?"
    (row_id,) = db.execute(query, (position(partition_id, 0), position(partition_id + 1, 0))).fetchone()
    return None if row_id is None else offset_of(row_id)
