"""Checksums of the file's pages, beside it, which find and repair a flipped byte.

Two checksums of a page (CRC-32 and Adler-32) are kept in `broker.sums`. The CRC says where a single byte was changed
and into what: it is linear, so the difference between the CRC stored and the CRC found depends on the change alone. The
other checksum confirms the correction. So one flipped byte in a page costs nothing, wherever it is: in a record, in an
index, in the header of the file. Larger damage is detected and left to `inspection`.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 4096
_READ_BYTES = 256 * PAGE_BYTES
_ENTRY = struct.Struct("<II")
_POLYNOMIAL = 0xEDB88320


class Scrubbed(NamedTuple):
    """Numbers of pages, from 1 on: repaired, and damaged beyond repair. `unknown` pages have no checksum yet."""

    healed: list[int]
    damaged: list[int]
    unknown: int


def sums(page: bytes | memoryview) -> tuple[int, int]:
    return zlib.crc32(page), zlib.adler32(page)


class PageSums:
    """The file of checksums: 8 bytes for each page, zeros where none is known."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._known = array("Q", self._whole())

    def close(self) -> None:
        os.close(self._file)

    @property
    def any(self) -> bool:
        """Whether a checksum is known."""
        return any(self._known)

    def reserve(self, pages: int) -> None:
        """Have room for so many pages, so that `put` cannot fail for want of space. Raises `OSError`."""
        missing = pages - len(self._known)
        if missing > 0:
            _write(self._file, bytes(missing * _ENTRY.size), len(self._known) * _ENTRY.size)
            self._known.extend([0] * missing)

    def put(self, pages: Mapping[int, tuple[int, int]], total: int) -> None:
        """Note checksums of pages by number; the file has `total` pages now. Durable on return. Raises `OSError`."""
        self.reserve(total)
        for number, found in pages.items():
            if number <= total:
                self._set(number, _ENTRY.pack(*found))
        if len(self._known) > total:  # the file was cut: what it grows by later is new
            del self._known[total:]
            os.ftruncate(self._file, total * _ENTRY.size)
        os.fsync(self._file)

    def scrub(self, database: Path, passed_over: set[int]) -> Scrubbed:
        """Check every page and repair what can be repaired. Pages in `passed_over` have a newer version in the log."""
        result = Scrubbed([], [], 0)
        unknown = 0
        handle = os.open(database, os.O_RDWR)
        try:
            number = 0
            while chunk := os.pread(handle, _READ_BYTES, number * PAGE_BYTES):
                for at in range(0, len(chunk) - PAGE_BYTES + 1, PAGE_BYTES):
                    number += 1
                    page = memoryview(chunk)[at : at + PAGE_BYTES]
                    if not self._entry(number):
                        unknown += number not in passed_over
                    elif _ENTRY.pack(*sums(page)) != self._entry(number).to_bytes(8, "little"):
                        self._mend(handle, number, bytes(page), result, expected=number not in passed_over)
                if len(chunk) < _READ_BYTES:
                    break
            os.fsync(handle)
            os.fsync(self._file)
        finally:
            os.close(handle)
        return result._replace(unknown=unknown)

    def _mend(self, database: int, number: int, page: bytes, result: Scrubbed, *, expected: bool) -> None:
        crc, adler = _ENTRY.unpack(self._entry(number).to_bytes(8, "little"))
        found = sums(page)
        if (
            found[0] == crc or found[1] == adler
        ):  # a changed byte in the page would change both checksums: so the entry is damaged
            self._set(number, _ENTRY.pack(*found))
            result.healed.append(number)
            return
        mended = corrected(page, crc, adler)
        if mended is not None:
            _write(database, mended, (number - 1) * PAGE_BYTES)
            result.healed.append(number)
        elif expected:
            result.damaged.append(number)

    def _entry(self, number: int) -> int:
        return self._known[number - 1] if number <= len(self._known) else 0

    def _set(self, number: int, entry: bytes) -> None:
        self._known[number - 1] = int.from_bytes(entry, "little")
        _write(self._file, entry, (number - 1) * _ENTRY.size)

    def _whole(self) -> bytes:
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        return data[: len(data) // _ENTRY.size * _ENTRY.size]


def corrected(data: bytes, crc: int, adler: int) -> bytes | None:
    """The data with the one byte changed that makes both checksums right; None when no such change does."""
    difference = zlib.crc32(data) ^ crc
    for at in range(len(data) - 1, -1, -1):
        change = _CHANGE.get(difference)
        if change is not None:
            candidate = data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
            if sums(candidate) == (crc, adler):
                return candidate
        # One byte back: undo what the byte behind did to the difference.
        index = _INDEX[difference >> 24]
        difference = ((difference ^ _TABLE[index]) << 8 | index) & 0xFFFFFFFF
    return None


def differ(one: bytes, other: bytes) -> int:
    """In how many places two byte strings of one length differ."""
    return sum(map(int.__ne__, one, other))


def sums_of(path: Path) -> dict[int, tuple[int, int]]:
    """The checksums of all pages of a file as it is."""
    found: dict[int, tuple[int, int]] = {}
    with path.open("rb") as file:
        while len(page := file.read(PAGE_BYTES)) == PAGE_BYTES:
            found[len(found) + 1] = sums(page)
    return found


def _write(handle: int, data: bytes, at: int) -> None:
    if os.pwrite(handle, data, at) != len(data):
        raise OSError("the disk took only a part of a write")


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()
"""What a byte adds to a CRC-32."""
_CHANGE = {crc: change for change, crc in enumerate(_TABLE) if change}
_INDEX = {crc >> 24: index for index, crc in enumerate(_TABLE)}
