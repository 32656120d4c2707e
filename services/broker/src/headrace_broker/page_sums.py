"""Checksums of the pages of the file, by which a changed byte is detected and repaired.

The file `broker.sums` contains two checksums of each page (CRC-32 and Adler-32). CRC-32 is linear, so the difference
between the stored and the computed value depends only on the change, and determines the position and the old value of a
single changed byte. Adler-32 confirms the correction. So one changed byte per page is repaired, in records as well as
in indices and the header. Larger damage is detected and passed to `inspection`.
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


class ScrubResult(NamedTuple):
    """Result of `PageSums.scrub`: numbers (from 1) of repaired pages and of damaged pages, and how many pages have no
    checksums."""

    repaired_pages: list[int]
    damaged: list[int]
    unknown: int


def sums(page: bytes | memoryview) -> tuple[int, int]:
    """Return CRC-32 and Adler-32 of a page."""
    return zlib.crc32(page), zlib.adler32(page)


class PageSums:
    """File with 8 bytes of checksums for each page of the database file. Zero means that the checksums are not
    known."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._entries = array("Q", self._read_entries())

    def close(self) -> None:
        os.close(self._file)

    @property
    def any(self) -> bool:
        """Whether the checksums of at least one page are known."""
        return any(self._entries)

    def reserve(self, pages: int) -> None:
        """Extend the file to `pages` entries, so that a later `put` cannot fail because of a full disk. Raises
        `OSError`."""
        missing = pages - len(self._entries)
        if missing > 0:
            _write(self._file, bytes(missing * _ENTRY.size), len(self._entries) * _ENTRY.size)
            self._entries.extend([0] * missing)

    def put(self, pages: Mapping[int, tuple[int, int]], total: int) -> None:
        """Store the checksums of changed pages of the database file, and sync them to the disk."""
        self.reserve(total)
        for number, checksums in pages.items():
            if number <= total:
                self._set(number, _ENTRY.pack(*checksums))
        if len(self._entries) > total:  # the database file was truncated
            del self._entries[total:]
            os.ftruncate(self._file, total * _ENTRY.size)
        os.fsync(self._file)

    def scrub(self, database: Path, superseded: set[int]) -> ScrubResult:
        """Check all pages of the database file, and repair changed bytes. Damage of a page in `superseded` is not
        reported, because the write-ahead log contains a newer version of it."""
        result = ScrubResult([], [], 0)
        unknown = 0
        handle = os.open(database, os.O_RDWR)
        try:
            number = 0
            while chunk := os.pread(handle, _READ_BYTES, number * PAGE_BYTES):
                for at in range(0, len(chunk) - PAGE_BYTES + 1, PAGE_BYTES):
                    number += 1
                    page = memoryview(chunk)[at : at + PAGE_BYTES]
                    if not self._entry(number):
                        unknown += number not in superseded
                    elif _ENTRY.pack(*sums(page)) != self._entry(number).to_bytes(8, "little"):
                        self._repair(handle, number, bytes(page), result, is_current=number not in superseded)
                if len(chunk) < _READ_BYTES:
                    break
            os.fsync(handle)
            os.fsync(self._file)
        finally:
            os.close(handle)
        return result._replace(unknown=unknown)

    def _repair(self, database: int, number: int, page: bytes, result: ScrubResult, *, is_current: bool) -> None:
        crc, adler = _ENTRY.unpack(self._entry(number).to_bytes(8, "little"))
        page_crc, page_adler = sums(page)
        if page_crc == crc or page_adler == adler:
            # A changed byte in the page would change both checksums, so the entry is damaged instead.
            self._set(number, _ENTRY.pack(page_crc, page_adler))
            result.repaired_pages.append(number)
            return
        repaired_page = correct_changed_byte(page, crc, adler)
        if repaired_page is not None:
            _write(database, repaired_page, (number - 1) * PAGE_BYTES)
            result.repaired_pages.append(number)
        elif is_current:
            result.damaged.append(number)

    def _entry(self, number: int) -> int:
        return self._entries[number - 1] if number <= len(self._entries) else 0

    def _set(self, number: int, entry: bytes) -> None:
        self._entries[number - 1] = int.from_bytes(entry, "little")
        _write(self._file, entry, (number - 1) * _ENTRY.size)

    def _read_entries(self) -> bytes:
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        return data[: len(data) // _ENTRY.size * _ENTRY.size]


def correct_changed_byte(data: bytes, crc: int, adler: int) -> bytes | None:
    """Return `data` with one byte changed so that both checksums match, or None if no single change achieves that."""
    difference = zlib.crc32(data) ^ crc
    for at in range(len(data) - 1, -1, -1):
        change = _CHANGE.get(difference)
        if change is not None:
            candidate = data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
            if sums(candidate) == (crc, adler):
                return candidate
        # Go back by one byte: undo the effect of the following byte on the difference.
        index = _INDEX[difference >> 24]
        difference = ((difference ^ _TABLE[index]) << 8 | index) & 0xFFFFFFFF
    return None


def count_differences(first: bytes, second: bytes) -> int:
    """Return the number of positions at which two byte strings of equal length differ."""
    return sum(map(int.__ne__, first, second))


def sums_of(path: Path) -> dict[int, tuple[int, int]]:
    """Compute the checksums of all pages of a file, by page number from 1."""
    checksums: dict[int, tuple[int, int]] = {}
    with path.open("rb") as file:
        while len(page := file.read(PAGE_BYTES)) == PAGE_BYTES:
            checksums[len(checksums) + 1] = sums(page)
    return checksums


def _write(handle: int, data: bytes, at: int) -> None:
    if os.pwrite(handle, data, at) != len(data):
        raise OSError("the disk has written only a part of the data")


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()
"""CRC-32 of each single byte value, the table of the usual algorithm."""
_CHANGE = {crc: change for change, crc in enumerate(_TABLE) if change}
_INDEX = {crc >> 24: index for index, crc in enumerate(_TABLE)}
