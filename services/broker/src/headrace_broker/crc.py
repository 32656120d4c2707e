"""CRC-32C (Castagnoli), the checksum of record batches, from aiokafka's C extension.

aiokafka takes longer to import than the rest of the broker; `prepare` does it once the port is open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


def crc32c(data: bytes | memoryview) -> int:
    return prepare()(data)


@cache
def prepare() -> Callable[[bytes | memoryview], int]:
    """Import the implementation. Blocks for about 0.2 s the first time."""
    from aiokafka.record.util import calc_crc32c

    implementation: Callable[[bytes | memoryview], int] = calc_crc32c
    return implementation
