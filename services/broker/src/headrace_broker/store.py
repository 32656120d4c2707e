"""The broker's one file: a SQLite database in WAL mode, held by one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from pathlib import Path

from headrace_broker import inspection
from headrace_broker.guard import Guard, RepairReport
from headrace_broker.inspection import Lost
from headrace_broker.store_format import FORMAT, FROM_1, TABLES
from headrace_runtime import disk
from headrace_runtime.errors import SettingError
from headrace_runtime.logs import get_logger

log = get_logger(__name__)


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
        self._guard = Guard(self.path)
        self._suspicion = folder / "broker.suspicion"
        self.mended = 0
        """Pages and frames that the start repaired."""
        self.lost: list[Lost] = []
        """What the start could not repair."""
        try:
            self._keeper = self._opened()
        except BaseException:
            self._guard.close()
            os.close(self._lock)
            raise

    def connect(self) -> sqlite3.Connection:
        """A connection in autocommit mode. It belongs to one thread at a time."""
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # decides only for an empty file, and before WAL
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {'FULL' if self._fsync else 'NORMAL'}")
            db.execute("PRAGMA fullfsync = 1")  # macOS: fsync alone does not reach the disk
            db.execute("PRAGMA wal_autocheckpoint = 0")  # the guard makes them
            db.execute("PRAGMA cache_size = -16000")
            if self._file_bytes_max:
                page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
                db.execute(f"PRAGMA max_page_count = {max(1, self._file_bytes_max // page_bytes)}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def committed(self, db: sqlite3.Connection) -> None:
        """Called after each commit, before it is acknowledged."""
        self._guard.committed(db)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._guard.checkpoint(self._keeper)
        self._keeper.close()
        self._guard.close()
        os.close(self._lock)

    def note_damage(self) -> None:
        """Make the next start check every row. Called when a reader finds damage, before the process ends."""
        self._suspicion.touch()

    def _opened(self) -> sqlite3.Connection:
        """A connection that stays: SQLite makes a checkpoint of its own when the last one is closed."""
        found = self._mended()
        try:
            db = self.connect()
            try:
                if found.unguarded or found.damaged_pages or self._suspicion.exists():
                    return self._inspected(db, found)
                self._prepare(db)
            except BaseException:
                db.close()
                raise
        except sqlite3.DatabaseError as error:
            if disk.is_full(error):
                raise disk.no_room(self.path.parent) from error
            remedy = f"cannot be read: {error}; put a backup in its place, or move it away to begin anew"
            raise SettingError("data_dir", str(self.path), remedy) from None
        self._guard.checkpoint(db)
        return db

    def _mended(self) -> RepairReport:
        try:
            found = self._guard.mend()
        except OSError as error:
            if disk.is_full(error):
                raise disk.no_room(self.path.parent) from error
            raise SettingError("data_dir", str(self.path), f"cannot be read: {error.strerror}") from None
        self.mended = len(found.healed_pages) + len(found.healed_frames)
        if self.mended:
            log.error("file_mended", file=str(self.path), pages=found.healed_pages, log_frames=found.healed_frames,
                      remedy="nothing is lost, but bytes changed on the disk by themselves: check it")  # fmt: skip
        return found

    def _inspected(self, db: sqlite3.Connection, found: RepairReport) -> sqlite3.Connection:
        """Remove damaged rows; if the structure is damaged, copy the rest into a new file. Then accept the file."""
        if not inspection.sound(db):
            log.error("file_broken", file=str(self.path), pages=found.damaged_pages, remedy="it is read into a new one")
            db = self._copied(db)
        self._prepare(db)
        self.lost += inspection.take_out(db)
        if self._guard.checkpoint(db):
            self._guard.adopt()
            self._suspicion.unlink(missing_ok=True)
        for lost in self.lost:
            log.error("records_lost", **lost._replace(raw=b"")._asdict())
        return db

    def _copied(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """What can be read, in a new file of the same name; the damaged one stays beside it."""
        fresh = self.path.with_name("broker.sqlite.new")
        fresh.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as target:
            target.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._prepare(target)
            self.lost += inspection.copy(db, target)
        db.close()
        aside = self.path.with_name(f"broker.sqlite.damaged-{time.time_ns()}")
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)  # closing folded it into the file
        self.path.rename(aside)
        fresh.rename(self.path)
        log.error("file_copied", damaged=str(aside), remedy="keep it until you know that nothing of it is missed")
        return self.connect()

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
            db.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif found == 1:
            db.executescript(f"BEGIN; {FROM_1} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif found != FORMAT:
            raise SettingError(
                "data_dir",
                str(self.path),
                f"has format {found}, this broker reads {FORMAT}; use the broker that wrote it",
            )
