"""Keeps the checksums of the file and of its write-ahead log in step with SQLite, and uses them at the start.

SQLite writes pages to its log at a commit and from there to the file at a checkpoint. So a page's checksum is noted
twice: with its frame, right after the commit, and with its place in the file, after the checkpoint and before the log
begins anew. That order is why checkpoints are made here and not by SQLite on its own.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from headrace_broker.page_sums import PageSums, sums_of
from headrace_broker.wal_sums import WalSums

WAL_PAGES = 4_000
"""The log is folded into the file past 16 MB: seldom enough to be cheap, small enough to be quick."""


class RepairReport(NamedTuple):
    """What the start repaired (bytes in pages and frames), and the pages that it could not repair."""

    healed_pages: list[int]
    healed_frames: list[int]
    damaged_pages: list[int]
    unguarded: bool
    """A file without checksums: of an older broker, or put there from a backup."""


class Guard:
    """`mend` before SQLite opens the file; `committed` and `checkpoint` on the thread that writes."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._pages = PageSums(database.with_name("broker.sums"))
        self._wal = WalSums(database, database.with_name("broker.frames"))

    def close(self) -> None:
        self._pages.close()
        self._wal.close()

    def mend(self) -> RepairReport:
        """Repair what can be repaired. Raises `OSError`."""
        if not self._database.exists() or not self._database.stat().st_size:
            return RepairReport([], [], [], unguarded=False)
        unguarded = not self._pages.any
        log = self._wal.mend()
        scrubbed = self._pages.scrub(self._database, log.pages)
        return RepairReport(scrubbed.healed, log.healed, scrubbed.damaged + sorted(log.damaged), unguarded)

    def adopt(self) -> None:
        """Accept the file as it is. Call it after a checkpoint, before anything else is written."""
        found = sums_of(self._database)
        self._pages.put(found, len(found))

    def committed(self, db: sqlite3.Connection) -> None:
        """Note what a commit wrote, and make a checkpoint when one is due. If it fails, the next call does it."""
        try:
            self._wal.note()
        except OSError:
            return
        if self._wal.frames >= WAL_PAGES:
            self.checkpoint(db)

    def checkpoint(self, db: sqlite3.Connection) -> bool:
        """Copy the log into the file. Returns whether all of it is there; readers may delay it."""
        try:
            self._wal.note()
            total = db.execute("PRAGMA page_count").fetchone()[0]
            self._pages.reserve(total)
            busy, frames, folded = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if busy or frames != folded:
                return False
            self._pages.put(self._wal.pages, total)
        except (OSError, sqlite3.OperationalError):
            return False  # a full disk: the log grows until it has no room either, which producers are told
        return True
