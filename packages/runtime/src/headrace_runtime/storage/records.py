"""A small value in a blob store that several processes replace by compare-and-swap.

The value is a sequence of numbered records, of which the last one is valid. A record is created once, exclusively, and
never changed. The process that creates record n + 1 replaces record n, and all others get False.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from headrace_runtime.errors import Unavailable
from headrace_runtime.storage.blobs import BlobStore

_KEPT = 8
"""Number of latest records that are not deleted, for readers that have listed but not yet read them."""
_READS_MAX = 20


@dataclass(frozen=True, slots=True)
class Record:
    """One value of the sequence, with its number."""

    number: int
    data: bytes


class Records:
    """Sequence of numbered records in a blob store. The record with the highest number is the current value of `name`.
    Methods block and raise `Unavailable`."""

    def __init__(self, blobs: BlobStore, name: str) -> None:
        self._blobs = blobs
        self._folder = f"records/{name}"

    def newest(self) -> Record | None:
        """Return the current value: the record with the highest number, or None if there is no record.

        Raises:
            Unavailable: the value is replaced faster than it can be read.
        """
        for _ in range(_READS_MAX):
            numbers = self._numbers()
            if not numbers:
                return None
            data = self._blobs.pointer(self._name(numbers[-1]))
            if data is not None:
                return Record(numbers[-1], data)
        raise Unavailable(f"{self._folder} in {self._blobs.url} is replaced faster than it can be read")

    def append(self, after: int, data: bytes) -> bool:
        """Write the record with the number `after + 1`. Return True, or False if another process has written it before.

        If this raises, the record may have been written nevertheless.

        Args:
            after: the number of the record that the caller has read as the current value, 0 without one.
            data: the new value. It must differ from the data of all other calls, so that a repeated call after a lost
                response recognises its own record.
        """
        number = after + 1
        if not self._blobs.create(self._name(number), data) and self._blobs.pointer(self._name(number)) != data:
            return False
        numbers = self._numbers()
        if numbers[-1] != number:  # `after` was replaced long ago, and its successor has been removed
            return False
        with contextlib.suppress(Unavailable):  # the next call removes them
            for old in numbers:
                if old <= number - _KEPT:
                    self._blobs.remove_pointer(self._name(old))
        return True

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._blobs.pointers(self._folder) if name.isdigit()]

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:016d}"
