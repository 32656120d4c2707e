"""Bounded decompression of record bodies, for compaction and validation."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable

from headrace_broker.errors import Malformed

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
OPENED_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of a decompressed body. A malicious megabyte can expand to a gigabyte."""
_XERIAL = b"\x82SNAPPY\0"
_XERIAL_HEADER_BYTES = 16


def decompress(codec: int, body: bytes | memoryview) -> memoryview:
    """Return the decompressed records of a batch. Raises `Malformed` for invalid or too large data."""
    if codec == NONE:
        return memoryview(body)
    import cramjam

    try:
        return _OPEN[codec](body)
    except (zlib.error, cramjam.DecompressionError, ValueError, struct.error) as error:
        raise Malformed(f"compressed records (codec {codec}): {error}") from None


def compress_gzip(body: bytes) -> bytes:
    """Compress the records of a rewritten batch with gzip, which all clients support."""
    compressor = zlib.compressobj(level=6, wbits=31)
    return compressor.compress(body) + compressor.flush()


def _gunzip(body: bytes | memoryview) -> memoryview:
    decompressor = zlib.decompressobj(wbits=31)
    data = decompressor.decompress(body, OPENED_BYTES_MAX)
    if not decompressor.eof:
        raise ValueError("the data are truncated or too large when decompressed")
    return memoryview(data)


def _snappy(body: bytes | memoryview) -> memoryview:
    """Decompress raw snappy, or snappy blocks with the header that Java clients write."""
    from cramjam import snappy

    data = bytes(body)
    blocks = [data]
    if data.startswith(_XERIAL):
        blocks, at = [], _XERIAL_HEADER_BYTES
        while at < len(data):
            (size,) = struct.unpack_from(">I", data, at)
            blocks.append(data[at + 4 : at + 4 + size])
            at += 4 + size
    if sum(snappy.decompress_raw_len(block) for block in blocks) > OPENED_BYTES_MAX:
        raise ValueError("the data are too large when decompressed")
    return memoryview(b"".join(bytes(snappy.decompress_raw(block)) for block in blocks))


def _lz4(body: bytes | memoryview) -> memoryview:
    from cramjam import lz4

    return _decompress_into(lz4.decompress_into, bytes(body))


def _zstd(body: bytes | memoryview) -> memoryview:
    from cramjam import zstd

    return _decompress_into(zstd.decompress_into, bytes(body))


def _decompress_into(decompress: Callable[[bytes, mmap.mmap], int], body: bytes) -> memoryview:
    """Decompress into a memory map of the largest allowed size, of which only written pages are allocated."""
    out = mmap.mmap(-1, OPENED_BYTES_MAX)
    return memoryview(out)[: decompress(body, out)]


_OPEN: dict[int, Callable[[bytes | memoryview], memoryview]] = {
    GZIP: _gunzip,
    SNAPPY: _snappy,
    LZ4: _lz4,
    ZSTD: _zstd,
}
