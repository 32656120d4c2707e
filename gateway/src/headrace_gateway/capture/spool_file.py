"""Segment files of the spool. Each file is allocated completely before its first record, and damage of a file affects
only the damaged records.

A segment is a file of a fixed size with consecutive records:

    magic 4 | payload length 4 | sequence 8 | CRC of these 4 | payload | BLAKE2b-16 of sequence and payload

The magic is not valid UTF-8 but payloads are, so no payload contains it. After a record with a damaged header, the next
record is found by its magic and the CRC of its header. A record with a damaged payload is skipped by its length. In
both cases only the damaged record is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

MAGIC = b"\xf5\xfeHR"
_HEADER = struct.Struct("<4sIQ")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CRC.size
_DIGEST_BYTES = 16
OVERHEAD_BYTES = _HEADER_BYTES + _DIGEST_BYTES
_STRAY_BYTES_MAX = OVERHEAD_BYTES // 2
"""Number of nonzero bytes in unused space below which they cannot be the rest of a record."""
_SUFFIX = ".spool"
_SLOT = struct.Struct("<QQQ")
_SLOT_BYTES = _SLOT.size + _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Spooled:
    """Event in the spool. `value` is its JSON without an envelope."""

    topic: str
    value: bytes
    traceparent: str | None = None
    seq: int = 0
    damage: str = ""
    """For a damaged record, the reason and the position; `value` then contains the bytes that are left. Empty for an
    intact event."""


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """Result of reading one record of a segment: the event, and the offset in the file after it. `event` is None where
    the bytes contain no record."""

    event: Spooled | None
    end: int


def encode_record(event: Spooled, seq: int) -> bytes:
    about = json.dumps([event.topic, event.traceparent], ensure_ascii=False).encode()
    payload = about + b"\n" + event.value
    header = _HEADER.pack(MAGIC, len(payload), seq)
    return header + _CRC.pack(crc32(header)) + payload + _digest(seq, payload)


def scan(data: bytes, base: int, file_name: str) -> Iterator[ScannedRecord]:
    """Yield the records in `data` in order, including damaged ones.

    Args:
        data: Bytes of a file.
        base: The position of `data` in the file.
        file_name: The name of the file, for damaged records.
    """
    at = 0
    while at < len(data):
        header = _header(data, at)
        if header is not None:
            seq, length = header
            end = at + OVERHEAD_BYTES + length
            yield ScannedRecord(_record(data[at:end], seq, f"{file_name}, byte {base + at}"), base + end)
        else:
            end = _next(data, at + 1)
            rest = data[at:end].rstrip(b"\0")
            if rest:
                yield ScannedRecord(_remains(rest, f"{file_name}, byte {base + at}"), base + at + len(rest))
        at = end


def _record(raw: bytes, seq: int, file_name: str) -> Spooled:
    payload, digest = raw[_HEADER_BYTES:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if digest != _digest(seq, payload):
        return Spooled("", raw, seq=seq, damage=f"{file_name}: the record does not match its digest")
    about, _, value = payload.partition(b"\n")
    topic, traceparent = json.loads(about)
    return Spooled(topic, value, traceparent, seq)


def _remains(raw: bytes, file_name: str) -> Spooled | None:
    if len(raw) - raw.count(0) < _STRAY_BYTES_MAX:
        return None
    return Spooled("", raw, damage=f"{file_name}: the record's header is damaged")


def _header(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the sequence number and the payload length if a complete record may begin at `at`, else None."""
    if data[at : at + 4] != MAGIC or at + OVERHEAD_BYTES > len(data):
        return None
    header = data[at : at + _HEADER.size]
    (crc,) = _CRC.unpack_from(data, at + _HEADER.size)
    if crc != crc32(header):
        return None
    _, length, seq = _HEADER.unpack(header)
    return (seq, length) if at + OVERHEAD_BYTES + length <= len(data) else None


def _next(data: bytes, at: int) -> int:
    """Return the offset at which the next readable record begins, or the length of `data`."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _header(data, at) is not None:
            return at
        at += 1
    return len(data)


def _digest(seq: int, payload: bytes) -> bytes:
    return blake2b(seq.to_bytes(8, "little") + payload, digest_size=_DIGEST_BYTES).digest()


class SegmentOffset(NamedTuple):
    """Position of a byte in the spool: the number of its segment, and its offset in the file."""

    number: int
    byte: int


@dataclass(slots=True, eq=False)
class Segment:
    """Open segment file. `end` is the offset at which the next record is written; all bytes after it are zero."""

    number: int
    path: Path
    handle: int
    size: int
    end: int = 0

    @classmethod
    def allocate(cls, folder: Path, number: int, size: int) -> Segment:
        """Create a segment file of `size` bytes. Raises `OSError` if the disk is full, and then leaves no file."""
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
    def open_existing(cls, folder: Path) -> list[Segment]:
        """Open the segments of an earlier process, and return them in order of their numbers.

        Until the content of a segment has been read, its `end` is the end of the file.
        """
        segments = []
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            if path.stem.isdigit():
                size = path.stat().st_size
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                segments.append(cls(int(path.stem), path, handle, size, size))
        return segments

    def read(self, start: int = 0) -> bytes:
        """Return the bytes from offset `start` up to `end`."""
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

    def overwrite(self, start: int, stop: int) -> None:
        """Overwrite a record with zeros because its caller was told that it was not stored, so that no later process
        reads it."""
        _pwrite(self.handle, bytes(stop - start), start)
        self.sync()

    def close(self) -> None:
        os.close(self.handle)

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


class Position:
    """File with the position up to which the bus has acknowledged all events. It has two slots, written alternately,
    each with a digest.

    If a slot is damaged or lost in a power failure, the older slot is valid: some events are then sent again with the
    same ids. Slots are overwritten in place, so that no disk space is needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None
        self._writes = 0

    def read_position(self) -> SegmentOffset:
        """Return the position up to which the bus has acknowledged the spooled events; the beginning of the first file
        if no valid position is stored.
        """
        data = self._path.read_bytes() if self._path.exists() else b""
        slots = [data[at : at + _SLOT_BYTES] for at in (0, _SLOT_BYTES)]
        valid = [
            _SLOT.unpack(slot[: _SLOT.size]) for slot in slots if _digest_data(slot[: _SLOT.size]) == slot[_SLOT.size :]
        ]
        self._writes, number, byte = max(valid, default=(0, 0, 0))
        return SegmentOffset(number, byte)

    def write(self, offset: SegmentOffset) -> None:
        with contextlib.suppress(OSError):
            if self._handle is None:
                self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._writes += 1
            slot = _SLOT.pack(self._writes, *offset)
            _pwrite(self._handle, slot + _digest_data(slot), self._writes % 2 * _SLOT_BYTES)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _pwrite(handle: int, data: bytes, at: int) -> int:
    """Write all of `data` at offset `at`. If the disk accepts only a part, the next write raises `OSError`."""
    view, written = memoryview(data), 0
    while written < len(data):
        written += os.pwrite(handle, view[written:], at + written)
    return written


def _digest_data(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
