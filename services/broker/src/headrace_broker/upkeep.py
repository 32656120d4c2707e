"""Writing side of maintenance: deletes of retention and compacted batches, in the writer's thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from headrace_broker.cleanup import Replacement
from headrace_broker.log import Log
from headrace_broker.store_format import position

_FREE_PAGES_KEPT = 4_000
"""Number of free pages that are kept for reuse. With more, and more than a quarter of the file, the file is shrunk."""


class Upkeep:
    """Write operations of maintenance. Each is short, and the caller must submit it to the writer."""

    def __init__(self, db: sqlite3.Connection, log: Log) -> None:
        self._db = db
        self._log = log

    def cut(self, partition_id: int, before: int) -> int:
        """Delete the batches before an offset, which becomes the start of the log. Return the freed bytes.

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
        """Replace batches by compacted ones. Return the number of bytes that this saves."""
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
        """Store where a compaction pass ended, and the size in bytes that it left."""
        statement = "UPDATE partitions SET cleaned_to = ?, clean_bytes = ? WHERE id = ?"
        self._db.execute(statement, (upto, kept_bytes, partition_id))

    def touch(self) -> None:
        """Write a row without changing it, to test whether commits succeed."""
        self._db.execute("UPDATE meta SET value = value WHERE name = 'cluster_id'")

    def purge(self, partition_id: int) -> int:
        """Delete up to 500 batches of a deleted topic's partition. Return their number."""
        statement = (
            "DELETE FROM batches WHERE position IN"
            " (SELECT position FROM batches WHERE position >= ? AND position < ? LIMIT 500)"
        )
        return self._db.execute(statement, (position(partition_id, 0), position(partition_id + 1, 0))).rowcount

    def shrink(self) -> bool:
        """Return some of the file's free pages to the system if there are many. Return whether there may be more."""
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        pages: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        if free < max(pages // 4, _FREE_PAGES_KEPT):
            return False
        self._db.execute("PRAGMA incremental_vacuum(1000)").fetchall()
        return True
