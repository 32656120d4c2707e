"""Log of spooled events across its segment files. Records are appended to the last file and read from the first, and
one file is allocated in advance.

All methods block, and must be called from one thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace_gateway.capture.spool_file import Position, Segment, SegmentOffset, Spooled, encode_record, scan
from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.storage import disk

_DATABASE = "spool.db"


class SpoolBroken(HeadraceError):
    """Raised if a spool file cannot be read at all. The file may contain turns, so it is never removed
    automatically."""


class SpoolLog:
    """Log of the spooled events of one process.

    About `reserve_bytes` are allocated in advance, so that `append` needs no new disk space. `trouble` is the reason
    why less than half of them could be allocated, or why the disk has too little free space; None without trouble.
    """

    def __init__(self, folder: Path, reserve_bytes: int, guard: disk.DiskGuard | None = None) -> None:
        self._folder = folder
        self._guard = guard
        self._reserve_bytes = reserve_bytes
        self._segment_bytes = reserve_bytes // 2
        self._segments: list[Segment] = []
        self._spares: list[Segment] = []
        self._number = 0
        self._seq = 0
        self._at = SegmentOffset(0, 0)
        self._position = Position(folder / "position")
        self._lock: int | None = None
        self._handed: list[tuple[Spooled, SegmentOffset]] = []
        self._refused: list[tuple[Segment, int, int]] = []
        self.trouble: str | None = None
        self.events = 0
        self.bytes = 0

    def open(self) -> None:
        """Open the log.

        Raises:
            SettingError: another process owns this folder.
            SpoolBroken: a file cannot be read.
            DiskFull: the disk is full.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if disk.is_full(error):
                raise disk.full_error(self._folder) from error
            remedy = f"cannot be used: {error.strerror}"
            raise SettingError("gateway.capture.spool_dir", str(self._folder), remedy) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._find()
            self._adopt_database()
        except BlockingIOError:
            self.close()
            remedy = "belongs to another gateway process; give each its own"
            raise SettingError("gateway.capture.spool_dir", str(self._folder), remedy) from None
        except BaseException:
            self.close()
            raise
        self.allocate_ahead()

    def close(self) -> None:
        """Close the files. Further calls have no effect."""
        for segment in (*self._segments, *self._spares):
            segment.close()
        self._segments, self._spares = [], []
        self._position.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, events: Sequence[Spooled]) -> None:
        """Append `events` durably. Raises `OSError`; in this case none of them is stored."""
        self._blank_refused()
        before: dict[Segment, int] = {}
        reached: dict[Segment, int] = {}
        try:
            for event in events:
                raw = encode_record(event, self._seq + 1)
                segment = self._with_room(len(raw))
                before.setdefault(segment, segment.end)
                reached[segment] = segment.end + len(raw)
                segment.write(raw)
                self._seq += 1
            for segment in before:
                segment.sync()
        except OSError:
            for segment, end in before.items():
                self._refused.append((segment, end, reached.get(segment, end)))
                segment.end = end
            with contextlib.suppress(OSError):
                self._blank_refused()
            raise
        self.events += len(events)
        self.bytes += sum(len(event.value) for event in events)
        self.allocate_ahead()

    def oldest(self, limit: int) -> list[Spooled]:
        """Return the first events that were not removed, at most `limit`. Damaged records are included, with the reason
        in `damage`."""
        self._handed = []
        at = self._at
        for event, at in self._records():
            if event is not None:
                self._handed.append((event, at))
            if len(self._handed) == limit:
                return [event for event, _ in self._handed]
        if not self._handed:  # damage may leave fewer readable events than were counted
            self._passed(at)
        return [event for event, _ in self._handed]

    def waiting(self) -> Iterator[Spooled]:
        """Yield all events that were not removed, in order."""
        return (event for event, _ in self._records() if event is not None)

    def _records(self) -> Iterator[tuple[Spooled | None, SegmentOffset]]:
        """Yield the records after the acknowledged position, each with the position after it."""
        for segment in list(self._segments):
            if segment.number < self._at.number:
                continue
            start = self._at.byte if segment.number == self._at.number else 0
            for scanned in scan(segment.read(start), start, segment.path.name):
                yield scanned.event, SegmentOffset(segment.number, scanned.end)

    def remove(self, events: Sequence[Spooled]) -> None:
        """Remove `events`, which must be the first of those that `oldest` returned last."""
        handed, self._handed = self._handed[: len(events)], self._handed[len(events) :]
        self.events = max(0, self.events - len(handed))
        self.bytes = max(0, self.bytes - sum(len(event.value) for event, _ in handed))
        self._passed(handed[-1][1])

    def allocate_ahead(self) -> None:
        """Reserve disk space for the events of requests in progress, so that they can be stored if the bus fails. If
        there is too little space, set `trouble`; never raise."""
        try:
            shortage = self._guard.shortage() if self._guard is not None else None
            if shortage is not None:
                self.trouble = shortage
                return
            while self._free_bytes() < self._reserve_bytes:
                self._spares.append(self._allocate(self._segment_bytes))
            self.trouble = None
        except OSError as error:
            full = disk.is_full(error)
            reason = str(disk.full_error(self._folder)) if full else f"disk: {self._folder}: {error.strerror}"
            self.trouble = reason if self._free_bytes() < self._reserve_bytes // 2 else None

    def _free_bytes(self) -> int:
        last = self._segments[-1] if self._segments else None
        return sum(spare.size for spare in self._spares) + (last.size - last.end if last else 0)

    def _passed(self, offset: SegmentOffset) -> None:
        self._at = offset
        self._position.write(offset)
        while self._segments and self._is_done(self._segments[0]):
            self._segments.pop(0).delete()
        if not self._segments or offset >= SegmentOffset(self._segments[-1].number, self._segments[-1].end):
            self.events = self.bytes = 0

    def _is_done(self, segment: Segment) -> bool:
        """Return whether the bus has acknowledged all events of a segment and no further record will be written to
        it."""
        if segment.number == self._at.number:
            return self._at.byte >= segment.end and segment is not self._segments[-1]
        return segment.number < self._at.number

    def _with_room(self, size: int) -> Segment:
        last = self._segments[-1] if self._segments else None
        if last is not None and last.end + size <= last.size:
            return last
        while self._spares and self._spares[0].size < size:
            self._spares.pop(0).delete()  # they are too small for this record
        segment = self._spares.pop(0) if self._spares else self._allocate(max(self._segment_bytes, size))
        self._segments.append(segment)
        return segment

    def _allocate(self, size: int) -> Segment:
        segment = Segment.allocate(self._folder, self._number + 1, size)
        self._number += 1
        return segment

    def _blank_refused(self) -> None:
        """Overwrite the records of failed `append` calls with zeros, so that no process reads them. Raises
        `OSError`."""
        while self._refused:
            segment, start, stop = self._refused[0]
            if segment in self._segments:
                segment.overwrite(start, stop)
            self._refused.pop(0)

    def _find(self) -> None:
        """Take over the segments that an earlier process left in the spool folder, and delete those without events."""
        self._at = self._position.read_position()
        segments = Segment.open_existing(self._folder)
        self._number = max([self._at.number, *(segment.number for segment in segments)])
        for segment in segments:
            if segment.number >= self._at.number and self._count(segment):
                self._segments.append(segment)
            else:
                segment.delete()

    def _count(self, segment: Segment) -> bool:
        """Count the events of a segment of an earlier process, and return whether there are any.

        This also sets the offset at which its next record is written.
        """
        start = self._at.byte if segment.number == self._at.number else 0
        end = start
        for scanned in scan(segment.read(start), start, segment.path.name):
            end = scanned.end
            if scanned.event is not None:
                self._seq = max(self._seq, scanned.event.seq)
                self.events += 1
                self.bytes += len(scanned.event.value)
        segment.end = end
        return end > start

    def _adopt_database(self) -> None:
        """Take over the events of an earlier release, which stored its spool in an SQLite database."""
        path = self._folder / _DATABASE
        if not path.exists():
            return
        try:
            with contextlib.closing(sqlite3.connect(path)) as db:
                rows = db.execute("SELECT topic, value, traceparent FROM events ORDER BY seq").fetchall()
        except sqlite3.Error as error:
            remedy = "it may hold turns, so move it aside rather than delete it"
            raise SpoolBroken(f"spool {path}: {error}; {remedy}") from None
        try:
            self.append([Spooled(*row) for row in rows])
        except OSError as error:
            raise disk.full_error(self._folder) from error
        path.unlink()
