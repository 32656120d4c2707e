"""CRC-32C (Castagnoli), the checksum of record batches, from aiokafka's C extension.

Importing aiokafka takes longer than the rest of the broker, so `prepare` imports it after the port is open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`."""
    return prepare()(data)


@cache
def prepare() -> Callable[[bytes | memoryview], int]:
    """Import and return the implementation. The first call blocks for about 0.2 s."""
    from aiokafka.record.util import calc_crc32c

    implementation: Callable[[bytes | memoryview], int] = calc_crc32c
    return implementation
