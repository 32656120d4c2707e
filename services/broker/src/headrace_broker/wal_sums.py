"""Checksums of the frames in SQLite's write-ahead log, by which a changed byte is repaired, and repair of the complete
file at the start.

SQLite treats the first frame with a wrong checksum as the end of the log, as it must after a power failure.
Acknowledged frames after it would be lost silently. SQLite's checksum cannot identify the changed byte. So the file
`broker.frames` has, for each frame, its header and both checksums of its page. It is written before an acknowledgement
but not synced. Entries that are missing after a power failure are not used.

https://www.sqlite.org/walformat.html describes the log and its index.

SQLite writes pages to its log at a commit, and from there to the file at a checkpoint. So a page's checksum is stored
twice: for its frame in the log right after the commit, and for the page in the file after the checkpoint, before the
log is reset. To ensure this order, this module makes the checkpoints, and SQLite's automatic ones are disabled.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from headrace_broker.page_sums import PAGE_BYTES, PageSums, correct_changed_byte, count_differences, sums, sums_of

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_FRAME_BYTES = _FRAME_HEADER_BYTES + PAGE_BYTES
_ENTRY = struct.Struct("<24s3I")
_TOP = struct.Struct("<32sI")
_LAST_FRAME_AT = 16
"""Position of the number of committed frames in SQLite's index of the log (the file `-shm`)."""
_SALT_AT = 16
"""Position of the eight salt bytes in the log's header. All frames of the log repeat them."""
_READ_FRAMES = 64
WAL_PAGES = 4_000
"""Number of frames (16 MB together) after which a checkpoint is due."""


class _Entry(NamedTuple):
    header: bytes
    crc: int
    adler: int
    check: int

    @property
    def intact(self) -> bool:
        return self.check == _check(self.header, self.crc, self.adler)


class LogRepair(NamedTuple):
    """Result of repairing a log: repaired frames, pages that the log contains, and pages whose frames could not be
    repaired."""

    repaired_pages: list[int]
    pages: set[int]
    damaged: set[int]


class WalSums:
    """Checksums of the frames of a write-ahead log.

    Call `repair` before SQLite opens the database, and `record_frames` after each commit.
    """

    def __init__(self, database: Path, path: Path) -> None:
        self._wal = Path(f"{database}-wal")
        self._index = Path(f"{database}-shm")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._log = -1
        self._shared = -1
        self._top = b""
        self.frames = 0
        """Number of committed frames with stored checksums."""
        self.pages: dict[int, tuple[int, int]] = {}
        """Checksums of the newest version of each page in the log by page number."""

    def close(self) -> None:
        for handle in (self._file, self._log, self._shared):
            if handle >= 0:
                os.close(handle)

    def repair(self) -> LogRepair:
        """Repair each frame in which a single byte has changed.

        A frame that cannot be repaired gets the checksum of its present bytes, so that later frames stay readable. Its
        page is reported as damaged.
        """
        result = LogRepair([], set(), set())
        try:
            handle = os.open(self._wal, os.O_RDWR)
        except FileNotFoundError:
            return result
        try:
            if self._repair_header(handle, result.repaired_pages):
                self._repair_frames(handle, result)
            os.fsync(handle)
        finally:
            os.close(handle)
        return result

    def record_frames(self) -> None:
        """Store the checksums of frames that were added since the last call. Raises `OSError`."""
        if self._log < 0:
            self._log, self._shared = os.open(self._wal, os.O_RDONLY), os.open(self._index, os.O_RDONLY)
        top = os.pread(self._log, _HEADER_BYTES, 0)
        if top != self._top:  # SQLite has reset the log
            self.frames, self._top = 0, top
            self.pages.clear()
            os.pwrite(self._file, _TOP.pack(top, zlib.crc32(top)), 0)
        committed = int.from_bytes(os.pread(self._shared, 4, _LAST_FRAME_AT), sys.byteorder)
        while self.frames < committed:
            self._record_frames(min(committed - self.frames, _READ_FRAMES))

    def _record_frames(self, count: int) -> None:
        data = memoryview(os.pread(self._log, count * _FRAME_BYTES, _HEADER_BYTES + self.frames * _FRAME_BYTES))
        entries = []
        for at in range(0, count * _FRAME_BYTES, _FRAME_BYTES):
            header, page = (
                bytes(data[at : at + _FRAME_HEADER_BYTES]),
                data[at + _FRAME_HEADER_BYTES : at + _FRAME_BYTES],
            )
            checksums = sums(page)
            entries.append(_ENTRY.pack(header, *checksums, _check(header, *checksums)))
            self.pages[int.from_bytes(header[:4], "big")] = checksums
        os.pwrite(self._file, b"".join(entries), _TOP.size + self.frames * _ENTRY.size)
        self.frames += count

    def _repair_header(self, handle: int, repaired_pages: list[int]) -> bool:
        """Repair a changed byte in the log's header. Return whether the stored checksums belong to this log."""
        top = os.pread(self._file, _TOP.size, 0)
        log_header = os.pread(handle, _HEADER_BYTES, 0)
        if len(top) != _TOP.size or len(log_header) != _HEADER_BYTES:
            return False
        header, check = _TOP.unpack(top)
        if zlib.crc32(header) != check:
            return count_differences(header, log_header) <= 1 or zlib.crc32(log_header) == check
        if header != log_header:
            if count_differences(header, log_header) != 1:
                return False
            os.pwrite(handle, header, 0)
            repaired_pages.append(0)
        return True

    def _repair_frames(self, handle: int, result: LogRepair) -> None:
        first_damaged: int | None = None
        salt = os.pread(handle, 8, _SALT_AT)
        number, at = 0, _HEADER_BYTES
        while len(frame := os.pread(handle, _FRAME_BYTES, at)) == _FRAME_BYTES:
            raw = os.pread(self._file, _ENTRY.size, _TOP.size + number * _ENTRY.size)
            if len(raw) != _ENTRY.size:
                break
            entry = _Entry(*_ENTRY.unpack(raw))
            repaired = _repaired_frame(frame, entry) if entry.intact else frame
            if repaired is None and frame[:_FRAME_HEADER_BYTES] == entry.header:
                repaired = frame
                first_damaged = number if first_damaged is None else first_damaged
                result.damaged.add(int.from_bytes(frame[:4], "big"))
            if repaired is None or repaired[8:16] != salt:
                break
            number += 1
            if repaired != frame:
                os.pwrite(handle, repaired, at)
                result.repaired_pages.append(number)
            result.pages.add(int.from_bytes(repaired[:4], "big"))
            at += _FRAME_BYTES
        if first_damaged is not None:
            _rewrite_checksums(handle, first_damaged, number)


def _repaired_frame(frame: bytes, entry: _Entry) -> bytes | None:
    """Return the frame with its changed byte repaired, or None if the checksums belong to another frame or more bytes
    have changed."""
    header, page = frame[:_FRAME_HEADER_BYTES], frame[_FRAME_HEADER_BYTES:]
    if sums(page) == (entry.crc, entry.adler):
        return entry.header + page if count_differences(header, entry.header) <= 1 else None
    restored = correct_changed_byte(page, entry.crc, entry.adler) if header == entry.header else None
    return None if restored is None else header + restored


def _check(header: bytes, crc: int, adler: int) -> int:
    return zlib.crc32(struct.pack("<2I", crc, adler), zlib.crc32(header))


def _rewrite_checksums(log: int, first: int, end: int) -> None:
    """Recompute SQLite's checksums of the frames in [first, end). Each depends on the checksum of the frame before
    it."""
    order = ">" if os.pread(log, 4, 0)[3] & 1 else "<"
    start = _HEADER_BYTES + first * _FRAME_BYTES
    seed = struct.unpack(">2I", os.pread(log, 8, start - _FRAME_BYTES + 16 if first else 24))
    for at in range(start, _HEADER_BYTES + end * _FRAME_BYTES, _FRAME_BYTES):
        frame = os.pread(log, _FRAME_BYTES, at)
        words = struct.unpack(f"{order}{2 + PAGE_BYTES // 4}I", frame[:8] + frame[_FRAME_HEADER_BYTES:])
        seed = _sqlite_sums(words, *seed)
        os.pwrite(log, struct.pack(">2I", *seed), at + 16)


def _sqlite_sums(words: tuple[int, ...], first: int, second: int) -> tuple[int, int]:
    """Continue SQLite's checksum over `words` (https://www.sqlite.org/fileformat2.html#checksum_algorithm). Return its
    two parts."""
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


class RepairReport(NamedTuple):
    """Result of the repair at the start: pages and frames that were repaired, and pages that could not be repaired."""

    repaired_pages: list[int]
    repaired_frames: list[int]
    damaged_pages: list[int]
    without_checksums: bool
    """Whether the file has no checksums, because an older broker wrote it, or because it was restored from a backup."""


class FileChecksums:
    """Checksums of the database file and of its write-ahead log.

    Call `repair` before SQLite opens the database, and the other methods in the thread that writes.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._pages = PageSums(database.with_name("broker.sums"))
        self._wal = WalSums(database, database.with_name("broker.frames"))

    def close(self) -> None:
        self._pages.close()
        self._wal.close()

    def repair(self) -> RepairReport:
        """Repair changed bytes in the database file and its log. Return what was repaired and what was not. Raises
        `OSError`."""
        if not self._database.exists() or not self._database.stat().st_size:
            return RepairReport([], [], [], without_checksums=False)
        without_checksums = not self._pages.any
        log = self._wal.repair()
        scrubbed = self._pages.scrub(self._database, log.pages)
        return RepairReport(
            scrubbed.repaired_pages, log.repaired_pages, scrubbed.damaged + sorted(log.damaged), without_checksums
        )

    def replace_checksums(self) -> None:
        """Compute and store the checksums of all present pages. Call it after a checkpoint, before further writes."""
        checksums = sums_of(self._database)
        self._pages.put(checksums, len(checksums))

    def record_commit(self, db: sqlite3.Connection) -> None:
        """Store the checksums of a commit, and make a checkpoint if the log is long.

        Failures are left to the next call.
        """
        try:
            self._wal.record_frames()
        except OSError:
            return
        if self._wal.frames >= WAL_PAGES:
            self.checkpoint(db)

    def checkpoint(self, db: sqlite3.Connection) -> bool:
        """Copy the log into the database file (checkpoint). Return False if the copy is incomplete, because readers
        still use the log."""
        try:
            self._wal.record_frames()
            total = db.execute("PRAGMA page_count").fetchone()[0]
            self._pages.reserve(total)
            busy, frames, folded = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if busy or frames != folded:
                return False
            self._pages.put(self._wal.pages, total)
        except (OSError, sqlite3.OperationalError):
            return False  # on a full disk the log grows until commits fail, too, which producers see
        return True
