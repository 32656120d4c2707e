"""One small value that several processes replace by compare-and-swap, on any blob store.

The value is a row of numbered records. A record is written once, exclusively, and never changed: whoever writes number
n + 1 has replaced number n, and whoever comes second is told so. The one with the highest number is the value.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import Unavailable

_KEPT = 8
"""Records that stay, for readers that have listed them and not read them yet."""
_READS_MAX = 20


@dataclass(frozen=True, slots=True)
class Record:
    """The value and its number."""

    number: int
    data: bytes


class Records:
    """The value `name` in a blob store. Methods block and raise `Unavailable`."""

    def __init__(self, blobs: BlobStore, name: str) -> None:
        self._blobs = blobs
        self._folder = f"records/{name}"

    def newest(self) -> Record | None:
        """The value, None while there is none."""
        for _ in range(_READS_MAX):
            numbers = self._numbers()
            if not numbers:
                return None
            data = self._blobs.pointer(self._name(numbers[-1]))
            if data is not None:
                return Record(numbers[-1], data)
        raise Unavailable(f"{self._folder} in {self._blobs.url} is replaced faster than it can be read")

    def append(self, after: int, data: bytes) -> bool:
        """Replace number `after`, 0 when there is no value. False when somebody else has replaced it.

        `data` must be unlike what any other call writes: after an answer that got lost it is known by it. When this
        raises, the value may have been replaced all the same.
        """
        number = after + 1
        if not self._blobs.create(self._name(number), data) and self._blobs.pointer(self._name(number)) != data:
            return False
        numbers = self._numbers()
        if numbers[-1] != number:  # `after` was replaced so long ago that its successor's number was free again
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
