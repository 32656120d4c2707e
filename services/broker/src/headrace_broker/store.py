"""The broker's one file: a SQLite database in WAL mode, held by one process.

A batch's row id is `position(partition, base offset)`, so the table itself is the index: a partition's batches lie side
by side in offset order, and retention frees whole runs of pages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from headrace_runtime import disk
from headrace_runtime.errors import SettingError

FORMAT = 1
_OFFSET_BITS = 44
OFFSET_MAX = (1 << _OFFSET_BITS) - 1
PARTITION_ID_MAX = (1 << (63 - _OFFSET_BITS)) - 1
_WAL_PAGES = 4_000
"""The log is folded into the file past 16 MB: seldom enough to be cheap, small enough to be quick."""

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY) WITHOUT ROWID;
INSERT INTO meta VALUES ('cluster_id', lower(hex(randomblob(16)))), ('next_producer_id', 1000);
CREATE TABLE topics (name TEXT PRIMARY KEY, config TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE partitions (
  id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, number INTEGER NOT NULL,
  log_start INTEGER NOT NULL DEFAULT 0, log_end INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
  max_timestamp INTEGER NOT NULL DEFAULT -1, cleaned_to INTEGER NOT NULL DEFAULT 0,
  clean_bytes INTEGER NOT NULL DEFAULT 0, UNIQUE (topic, number)
);
CREATE TABLE batches (
  position INTEGER PRIMARY KEY, last_offset INTEGER NOT NULL, max_timestamp INTEGER NOT NULL,
  reached_timestamp INTEGER NOT NULL, payload BLOB NOT NULL
);
CREATE TABLE producers (
  partition INTEGER NOT NULL, producer_id INTEGER NOT NULL, epoch INTEGER NOT NULL, recent BLOB NOT NULL,
  open_from INTEGER, seen_ms INTEGER NOT NULL, PRIMARY KEY (partition, producer_id)
) WITHOUT ROWID;
CREATE TABLE aborted (
  partition INTEGER NOT NULL, last_offset INTEGER NOT NULL, first_offset INTEGER NOT NULL, producer_id INTEGER NOT NULL,
  PRIMARY KEY (partition, last_offset)
) WITHOUT ROWID;
CREATE TABLE transactions (
  id TEXT PRIMARY KEY, producer_id INTEGER NOT NULL, epoch INTEGER NOT NULL, timeout_ms INTEGER NOT NULL,
  started_ms INTEGER, seen_ms INTEGER NOT NULL, partitions TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE offsets (
  group_id TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, committed INTEGER NOT NULL, metadata TEXT,
  PRIMARY KEY (group_id, topic, partition)
) WITHOUT ROWID;
CREATE TABLE pending_offsets (
  transaction_id TEXT NOT NULL, group_id TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL,
  committed INTEGER NOT NULL, metadata TEXT, PRIMARY KEY (transaction_id, group_id, topic, partition)
) WITHOUT ROWID;
CREATE TABLE groups (id TEXT PRIMARY KEY, state BLOB NOT NULL, used_ms INTEGER NOT NULL) WITHOUT ROWID;
"""


def position(partition_id: int, offset: int) -> int:
    """The row id of a batch. Offsets have 44 bits: five years at 100,000 records a second."""
    return partition_id << _OFFSET_BITS | offset


def partition_of(row_id: int) -> int:
    return row_id >> _OFFSET_BITS


def offset_of(row_id: int) -> int:
    return row_id & OFFSET_MAX


class Store:
    """Opens the file for this process alone. Raises `SettingError` when it cannot be this broker's, `DiskFull`.

    `connect` may be called from any thread; `close` releases the file once all connections are closed.
    """

    def __init__(self, folder: Path, *, fsync: bool = True, file_bytes_max: int = 0) -> None:
        self.path = folder / "broker.sqlite"
        self._fsync = fsync
        self._file_bytes_max = file_bytes_max
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked(folder)
        except OSError as error:
            if disk.is_full(error):
                raise disk.no_room(folder) from error
            raise SettingError("data_dir", str(folder), f"cannot be used: {error.strerror}") from None
        try:
            with contextlib.closing(self.connect()) as db:
                self._prepare(db)
        except sqlite3.DatabaseError as error:
            self.close()
            if disk.is_full(error):
                raise disk.no_room(folder) from error
            remedy = f"cannot be read: {error}; put a backup in its place, or move it away to begin anew"
            raise SettingError("data_dir", str(self.path), remedy) from None

    def connect(self) -> sqlite3.Connection:
        """A connection in autocommit mode. It belongs to one thread at a time."""
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # decides only for an empty file, and before WAL
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if self._fsync else 'NORMAL'}")
        db.execute("PRAGMA fullfsync = 1")  # macOS: fsync alone does not reach the disk
        db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        db.execute("PRAGMA cache_size = -16000")
        if self._file_bytes_max:
            page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
            db.execute(f"PRAGMA max_page_count = {max(1, self._file_bytes_max // page_bytes)}")
        return db

    def close(self) -> None:
        os.close(self._lock)

    def _locked(self, folder: Path) -> int:
        handle = os.open(folder / "broker.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise SettingError(
                "data_dir", str(folder), "another broker has this file open; stop it, or give this one its own data_dir"
            ) from None
        return handle

    def _prepare(self, db: sqlite3.Connection) -> None:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif found != FORMAT:
            self.close()
            raise SettingError(
                "data_dir",
                str(self.path),
                f"has format {found}, this broker reads {FORMAT}; use the broker that wrote it",
            )
