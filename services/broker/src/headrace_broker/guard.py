"""Checksums of the file and of its write-ahead log, which are updated with SQLite's writes and used at the start.

SQLite writes pages to its log at a commit, and from there to the file at a checkpoint. So a page's checksum is stored
twice: for its frame in the log right after the commit, and for the page in the file after the checkpoint, before the
log is reset. To ensure this order, this module makes the checkpoints, and SQLite's automatic ones are disabled.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from headrace_broker.page_sums import PageSums, sums_of
from headrace_broker.wal_sums import WalSums

WAL_PAGES = 4_000
"""Number of frames (16 MB) after which a checkpoint is due."""


class RepairReport(NamedTuple):
    """Pages and frames in which the start repaired bytes, and pages that it could not repair."""

    healed_pages: list[int]
    healed_frames: list[int]
    damaged_pages: list[int]
    unguarded: bool
    """Whether the file has no checksums, because an older broker wrote it or it comes from a backup."""


class Guard:
    """Checksums of one file. Call `repair` before SQLite opens it, and the other methods in the writing thread."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._pages = PageSums(database.with_name("broker.sums"))
        self._wal = WalSums(database, database.with_name("broker.frames"))

    def close(self) -> None:
        self._pages.close()
        self._wal.close()

    def repair(self) -> RepairReport:
        """Repair changed bytes as far as possible. Raises `OSError`."""
        if not self._database.exists() or not self._database.stat().st_size:
            return RepairReport([], [], [], unguarded=False)
        unguarded = not self._pages.any
        log = self._wal.repair()
        scrubbed = self._pages.scrub(self._database, log.pages)
        return RepairReport(scrubbed.healed, log.healed, scrubbed.damaged + sorted(log.damaged), unguarded)

    def adopt(self) -> None:
        """Store the checksums of the present pages. Must be called after a checkpoint, before further writes."""
        checksums = sums_of(self._database)
        self._pages.put(checksums, len(checksums))

    def committed(self, db: sqlite3.Connection) -> None:
        """Store the checksums of a commit, and make a checkpoint if one is due. Failures are left to the next call."""
        try:
            self._wal.note()
        except OSError:
            return
        if self._wal.frames >= WAL_PAGES:
            self.checkpoint(db)

    def checkpoint(self, db: sqlite3.Connection) -> bool:
        """Copy the log into the file. Return whether the copy is complete, which readers may delay."""
        try:
            self._wal.note()
            total = db.execute("PRAGMA page_count").fetchone()[0]
            self._pages.reserve(total)
            busy, frames, folded = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if busy or frames != folded:
                return False
            self._pages.put(self._wal.pages, total)
        except (OSError, sqlite3.OperationalError):
            return False  # on a full disk the log grows until commits fail, too, which producers see
        return True
