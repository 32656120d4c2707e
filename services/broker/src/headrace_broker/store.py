"""The broker's file: an SQLite database in WAL mode, which one process at a time opens."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from pathlib import Path

from headrace_broker import inspection
from headrace_broker.inspection import LostRange
from headrace_broker.store_format import FORMAT, FROM_1, TABLES
from headrace_broker.wal_sums import FileChecksums, RepairReport
from headrace_runtime.errors import SettingError
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import disk

log = get_logger(__name__)


class Store:
    """The broker's file, with a lock against other processes. All connections must be closed before `close` is
    called."""

    def __init__(self, folder: Path, *, fsync: bool = True, file_bytes_max: int = 0) -> None:
        """Lock the file, repair changed bytes, and open it.

        Args:
            folder: the folder of the file.
            fsync: whether commits are synced to the disk.
            file_bytes_max: maximum size of the file; 0 for no limit.

        Raises:
            SettingError: the folder or the file cannot be used by this broker.
            DiskFull: the disk is full.
        """
        self.path = folder / "broker.sqlite"
        self._fsync = fsync
        self._file_bytes_max = file_bytes_max
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire_lock(folder)
        except OSError as error:
            if disk.is_full(error):
                raise disk.full_error(folder) from error
            raise SettingError("data_dir", str(folder), f"cannot be used: {error.strerror}") from None
        self._guard = FileChecksums(self.path)
        self._suspicion = folder / "broker.suspicion"
        self.repaired = 0
        """Number of pages and frames that were repaired."""
        self.lost: list[LostRange] = []
        """Ranges that could not be repaired."""
        try:
            self._base_connection = self._open()
        except BaseException:
            self._guard.close()
            os.close(self._lock)
            raise

    def connect(self) -> sqlite3.Connection:
        """Open another connection in autocommit mode. One thread at a time may use it. The method is thread-safe."""
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only effective for an empty file, before WAL
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {'FULL' if self._fsync else 'NORMAL'}")
            db.execute("PRAGMA fullfsync = 1")  # on macOS a plain fsync does not reach the disk
            db.execute("PRAGMA wal_autocheckpoint = 0")  # `FileChecksums` makes the checkpoints
            db.execute("PRAGMA cache_size = -16000")
            if self._file_bytes_max:
                page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
                db.execute(f"PRAGMA max_page_count = {max(1, self._file_bytes_max // page_bytes)}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def record_commit(self, db: sqlite3.Connection) -> None:
        """Store the checksums of the pages that a commit has written. Must be called after each commit, before the
        commit is acknowledged."""
        self._guard.record_commit(db)

    def close(self) -> None:
        """Copy the write-ahead log into the database (checkpoint), close the file, and release its lock."""
        with contextlib.suppress(sqlite3.Error):
            self._guard.checkpoint(self._base_connection)
        self._base_connection.close()
        self._guard.close()
        os.close(self._lock)

    def note_damage(self) -> None:
        """Create a marker file by which the next start checks all rows. Must be called after damage was detected,
        before the process ends."""
        self._suspicion.touch()

    def _open(self) -> sqlite3.Connection:
        """Open the first connection. It stays open, because SQLite would make a checkpoint when the last connection is
        closed."""
        report = self._repair()
        try:
            db = self.connect()
            try:
                if report.without_checksums or report.damaged_pages or self._suspicion.exists():
                    return self._inspect(db, report)
                self._prepare(db)
            except BaseException:
                db.close()
                raise
        except sqlite3.DatabaseError as error:
            if disk.is_full(error):
                raise disk.full_error(self.path.parent) from error
            remedy = f"cannot be read: {error}; replace it by a backup, or move it away to begin with an empty file"
            raise SettingError("data_dir", str(self.path), remedy) from None
        self._guard.checkpoint(db)
        return db

    def _repair(self) -> RepairReport:
        try:
            report = self._guard.repair()
        except OSError as error:
            if disk.is_full(error):
                raise disk.full_error(self.path.parent) from error
            raise SettingError("data_dir", str(self.path), f"cannot be read: {error.strerror}") from None
        self.repaired = len(report.repaired_pages) + len(report.repaired_frames)
        if self.repaired:
            pages, frames = report.repaired_pages, report.repaired_frames
            log.error("file_mended", file=str(self.path), pages=pages, log_frames=frames,
                      remedy="no data are lost, but bytes have changed on the disk; check the disk")  # fmt: skip
        return report

    def _inspect(self, db: sqlite3.Connection, report: RepairReport) -> sqlite3.Connection:
        """Remove damaged rows, and store new checksums. Return a connection to the file.

        A file whose structure is damaged is first copied into a new file.
        """
        if not inspection.is_intact(db):
            remedy = "readable rows are copied into a new file"
            log.error("file_broken", file=str(self.path), pages=report.damaged_pages, remedy=remedy)
            db = self._copy(db)
        self._prepare(db)
        self.lost += inspection.remove_damaged(db)
        if self._guard.checkpoint(db):
            self._guard.replace_checksums()
            self._suspicion.unlink(missing_ok=True)
        for lost in self.lost:
            log.error("records_lost", **lost._replace(raw=b"")._asdict())
        return db

    def _copy(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """Copy the readable rows into a new file with the same name, and rename the damaged file. Return a connection
        to the new file."""
        fresh = self.path.with_name("broker.sqlite.new")
        fresh.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as target:
            target.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._prepare(target)
            self.lost += inspection.copy(db, target)
        db.close()
        damaged = self.path.with_name(f"broker.sqlite.damaged-{time.time_ns()}")
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)  # closing has copied the log into the file
        self.path.rename(damaged)
        fresh.rename(self.path)
        log.error(
            "file_copied", damaged=str(damaged), remedy="keep the damaged file until you are sure that it is not needed"
        )
        return self.connect()

    def _acquire_lock(self, folder: Path) -> int:
        handle = os.open(folder / "broker.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise SettingError(
                "data_dir", str(folder), "another broker has opened this file; stop it, or use another data_dir"
            ) from None
        return handle

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Create the tables of an empty file, or migrate those of an older format."""
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            db.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version == 1:
            db.executescript(f"BEGIN; {FROM_1} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version != FORMAT:
            raise SettingError(
                "data_dir",
                str(self.path),
                f"has format {version}, but this broker supports {FORMAT}; use the broker that wrote it",
            )
