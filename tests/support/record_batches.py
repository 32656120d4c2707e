"""Record batches as a producer makes them, from aiokafka's builder, with any header field changed on purpose."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

Entry = tuple[bytes | None, bytes | None]
_CRC_AT, _CHECKED_FROM = 17, 21
_AT = {
    "base_offset": (0, ">q"), "length": (8, ">i"), "magic": (16, ">b"), "attributes": (21, ">h"),
    "last_offset_delta": (23, ">i"), "base_timestamp": (27, ">q"), "max_timestamp": (35, ">q"),
    "producer_id": (43, ">q"), "epoch": (51, ">h"), "sequence": (53, ">i"), "count": (57, ">i"),
}  # fmt: skip


def now_ms() -> int:
    return int(time.time() * 1000)


def batch(
    entries: Iterable[Entry] = ((b"k", b"v"),),
    *,
    producer_id: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    compression: int = 0,
    transactional: bool = False,
    timestamps: Sequence[int] | None = None,
    **header: int,
) -> bytes:
    """Key and value pairs as a batch. `header` overwrites fields; the checksum is right all the same."""
    pairs = list(entries)
    times = timestamps or [now_ms()] * len(pairs)
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=compression, is_transactional=transactional, producer_id=producer_id,
        producer_epoch=epoch, base_sequence=sequence, batch_size=64 * 1024 * 1024,
    )  # fmt: skip
    for offset, ((key, value), timestamp) in enumerate(zip(pairs, times, strict=True)):
        builder.append(offset, timestamp, key, value, [])
    return patched(bytes(builder.build()), **header)


def patched(raw: bytes, **header: int) -> bytes:
    """The batch with header fields overwritten and a checksum that fits."""
    data = bytearray(raw)
    for name, value in header.items():
        at, layout = _AT[name]
        struct.pack_into(layout, data, at, value)
    struct.pack_into(">I", data, _CRC_AT, calc_crc32c(bytes(data[_CHECKED_FROM:])))
    return bytes(data)


def corrupted(raw: bytes) -> bytes:
    """The batch with its last byte changed and the checksum that it had."""
    return raw[:-1] + bytes([raw[-1] ^ 0xFF])
