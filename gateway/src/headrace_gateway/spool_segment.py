"""One file of the spool: allocated whole before its first record, so that writing into it needs no more room."""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

_SUFFIX = ".spool"
_SLOT = struct.Struct("<QQQ")
_DIGEST_BYTES = 16
_SLOT_BYTES = _SLOT.size + _DIGEST_BYTES


class SegmentOffset(NamedTuple):
    """A byte of a segment."""

    number: int
    byte: int


@dataclass(slots=True, eq=False)
class Segment:
    """`end` is where the next record goes; behind it are zeros."""

    number: int
    path: Path
    handle: int
    size: int
    end: int = 0

    @classmethod
    def allocate(cls, folder: Path, number: int, size: int) -> Segment:
        """Create a segment. Raises `OSError` when the disk has no room, and then leaves no file behind."""
        path = folder / f"{number:012d}{_SUFFIX}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            else:
                os.pwrite(handle, bytes(size), 0)
            os.fsync(handle)
            _sync_folder(folder)
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        return cls(number, path, handle, size)

    @classmethod
    def existing(cls, folder: Path) -> list[Segment]:
        """Return the segments of an earlier process, the oldest first. `end` is the end of the file: its content has
        to be read."""
        segments = []
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            if path.stem.isdigit():
                size = path.stat().st_size
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                segments.append(cls(int(path.stem), path, handle, size, size))
        return segments

    def read(self, start: int = 0) -> bytes:
        """Return the bytes from `start` up to `end`."""
        parts, at = [], start
        while at < self.end:
            part = os.pread(self.handle, self.end - at, at)
            if not part:
                break
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def write(self, data: bytes) -> None:
        self.end += _pwrite(self.handle, data, self.end)

    def sync(self) -> None:
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(self.handle)

    def blank(self, start: int, stop: int) -> None:
        """Write zeros over a refused record, so that no later process reads it."""
        _pwrite(self.handle, bytes(stop - start), start)
        self.sync()

    def close(self) -> None:
        os.close(self.handle)

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


class Position:
    """The position up to which the bus has everything: two slots, written in turn and each with a digest.

    A slot that is damaged or was lost in a power cut leaves the older one: some events are then sent again, with the
    same ids. Slots are overwritten in place, and a disk that refuses even that costs no more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None
        self._writes = 0

    def read(self) -> SegmentOffset:
        """Return the position, or the beginning if none is known."""
        data = self._path.read_bytes() if self._path.exists() else b""
        slots = [data[at : at + _SLOT_BYTES] for at in (0, _SLOT_BYTES)]
        valid = [
            _SLOT.unpack(slot[: _SLOT.size]) for slot in slots if _digest(slot[: _SLOT.size]) == slot[_SLOT.size :]
        ]
        self._writes, number, byte = max(valid, default=(0, 0, 0))
        return SegmentOffset(number, byte)

    def write(self, offset: SegmentOffset) -> None:
        with contextlib.suppress(OSError):
            if self._handle is None:
                self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._writes += 1
            slot = _SLOT.pack(self._writes, *offset)
            _pwrite(self._handle, slot + _digest(slot), self._writes % 2 * _SLOT_BYTES)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _pwrite(handle: int, data: bytes, at: int) -> int:
    """All of `data`; a disk that takes a part and no more raises at the next try."""
    view, written = memoryview(data), 0
    while written < len(data):
        written += os.pwrite(handle, view[written:], at + written)
    return written


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
