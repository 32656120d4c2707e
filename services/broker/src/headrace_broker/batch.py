"""Record batches (magic 2): parsing, checksum, decompression with a size limit, and the fields of records that the
broker needs.

The broker reads only the header of most batches. Of a record it reads the key, the timestamp, and whether it has a
value. The checksum is CRC-32C (Castagnoli) from aiokafka's C extension. Importing aiokafka takes longer than the rest
of the broker's start, so `prepare` imports it after the port is open.
https://kafka.apache.org/documentation/#recordbatch
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from headrace_broker.errors import Code, Malformed, Rejected


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`."""
    return prepare()(data)


@cache
def prepare() -> Callable[[bytes | memoryview], int]:
    """Import the function that computes CRC-32C, and return it. The first call takes about 0.2 s."""
    from aiokafka.record.util import calc_crc32c

    implementation: Callable[[bytes | memoryview], int] = calc_crc32c
    return implementation


_HEADER = struct.Struct(">qiibIhiqqqhii")
_BASE = struct.Struct(">qii")
_CRC_AT = 17
_CHECKED_FROM = 21
"""The CRC covers the bytes from the attributes on, so offset and leader epoch can be changed without recomputing it."""
HEADER_BYTES = _HEADER.size
_LENGTH_FROM = 12
_RECORD_BYTES_MIN = 7
"""Minimum size of a record: its length, attributes, two deltas, two lengths and the number of headers take one byte
each."""
_CODEC_BITS = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20
NO_PRODUCER = -1


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """A record batch: its bytes, and the fields of its header."""

    raw: bytes | memoryview
    base_offset: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int

    @property
    def codec(self) -> int:
        return self.attributes & _CODEC_BITS

    @property
    def transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def control(self) -> bool:
        return bool(self.attributes & _CONTROL)

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def body(self) -> memoryview:
        """Bytes of the records, compressed according to `codec`."""
        return memoryview(self.raw)[HEADER_BYTES:]

    def with_base_offset(self, offset: int) -> bytes:
        """Return a copy of the batch's bytes with `offset` as base offset."""
        return _BASE.pack(offset, len(self.raw) - _LENGTH_FROM, 0) + memoryview(self.raw)[_BASE.size :]

    def with_records(self, body: bytes, count: int, codec: int) -> bytes:
        """Return the bytes of a batch that contains only a part of the records, at the same offsets.

        Args:
            body: the remaining records, compressed according to `codec`.
            count: number of the remaining records.
        """
        attributes = self.attributes & ~_CODEC_BITS | codec
        return _pack(self, attributes, count, body)


def parse(raw: bytes | memoryview) -> RecordBatch:
    """Parse the header of a stored batch without validation."""
    base, _length, _epoch, _magic, _crc, attributes, delta, first, last, producer, epoch, sequence, count = (
        _HEADER.unpack_from(raw)
    )
    return RecordBatch(raw, base, attributes, delta, first, last, producer, epoch, sequence, count)


def checksum_fits(raw: bytes | memoryview) -> bool:
    """Return whether stored bytes are a complete batch with the right checksum."""
    length, checksum = struct.unpack_from(">i", raw, 8)[0], struct.unpack_from(">I", raw, _CRC_AT)[0]
    is_complete = length + _LENGTH_FROM == len(raw) and raw[16] == 2
    return is_complete and crc32c(memoryview(raw)[_CHECKED_FROM:]) == checksum


def parse_produced(raw: bytes | memoryview) -> RecordBatch:
    """Parse the batch that a producer sent, and validate it with the same checks as Kafka. Raises `Rejected`."""
    if len(raw) > 16 and raw[16] != 2:
        raise Rejected(Code.UNSUPPORTED_FOR_MESSAGE_FORMAT, f"message format {raw[16]} is not supported; use format 2")
    if len(raw) < HEADER_BYTES:
        raise Rejected(Code.INVALID_RECORD, f"a batch of {len(raw)} bytes is shorter than its header")
    length, checksum = struct.unpack_from(">i", raw, 8)[0], struct.unpack_from(">I", raw, _CRC_AT)[0]
    if length + _LENGTH_FROM < len(raw):
        raise Rejected(Code.INVALID_RECORD, "a request contains more than one batch for a partition")
    if length + _LENGTH_FROM != len(raw):
        raise Rejected(
            Code.INVALID_RECORD, f"the header of a batch states {length + _LENGTH_FROM} bytes, but it has {len(raw)}"
        )
    if crc32c(memoryview(raw)[_CHECKED_FROM:]) != checksum:
        raise Rejected(Code.CORRUPT_MESSAGE, "the checksum does not match")
    batch = parse(raw)
    _check(batch)
    return batch


def build_transaction_marker(*, committed: bool, producer_id: int, epoch: int, timestamp_ms: int) -> RecordBatch:
    """Build the control batch (transaction marker) that ends a producer's transaction in a partition by a commit or an
    abort."""
    key = struct.pack(">hh", 0, int(committed))
    value = struct.pack(">hi", 0, 0)
    record = bytes([0, 0, 0, 2 * len(key)]) + key + bytes([2 * len(value)]) + value + b"\0"
    template = RecordBatch(
        raw=b"",
        base_offset=0,
        attributes=_TRANSACTIONAL | _CONTROL,
        last_offset_delta=0,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=-1,
        count=1,
    )
    return parse(_pack(template, template.attributes, 1, bytes([2 * len(record)]) + record))


def _check(batch: RecordBatch) -> None:
    if batch.count < 1 or batch.count != batch.last_offset_delta + 1:
        raise Rejected(Code.INVALID_RECORD, f"{batch.count} records over {batch.last_offset_delta + 1} offsets")
    if batch.count * _RECORD_BYTES_MIN > (len(batch.body) if batch.codec == NONE else OPENED_BYTES_MAX):
        raise Rejected(Code.INVALID_RECORD, f"{batch.count} records do not fit into {len(batch.body)} bytes")
    if batch.control:
        raise Rejected(Code.INVALID_RECORD, "clients must not write control records")
    if batch.attributes & _LOG_APPEND_TIME:
        raise Rejected(Code.INVALID_TIMESTAMP, "the timestamp type must be CreateTime")
    if batch.codec > 4:
        raise Rejected(Code.UNSUPPORTED_COMPRESSION, f"compression {batch.codec} is not supported")
    if batch.producer_id != NO_PRODUCER and (batch.producer_epoch < 0 or batch.base_sequence < 0):
        raise Rejected(Code.INVALID_RECORD, "a producer id needs an epoch and a sequence")
    if batch.transactional and batch.producer_id == NO_PRODUCER:
        raise Rejected(Code.INVALID_RECORD, "a transactional batch needs a producer id")


def _pack(batch: RecordBatch, attributes: int, count: int, body: bytes) -> bytes:
    checked = (
        struct.pack(
            ">hiqqqhii",
            attributes,
            batch.last_offset_delta,
            batch.base_timestamp,
            batch.max_timestamp,
            batch.producer_id,
            batch.producer_epoch,
            batch.base_sequence,
            count,
        )
        + body
    )
    length = _CHECKED_FROM + len(checked) - _LENGTH_FROM
    return _BASE.pack(batch.base_offset, length, 0) + struct.pack(">bI", 2, crc32c(checked)) + checked


class RawRecord(NamedTuple):
    """One record of a batch, with the fields that the broker needs. They are views into the batch's bytes."""

    offset: int
    timestamp: int
    key: memoryview | None
    tombstone: bool
    raw: memoryview
    """Bytes of the record with its length, as they are in the batch. They contain deltas, so they are valid only in
    this batch."""


def records(batch: RecordBatch) -> Iterator[RawRecord]:
    """Yield the records of a batch in order. Raises `Malformed`, possibly after some records."""
    body = decompress(batch.codec, batch.body)
    at = 0
    for _ in range(batch.count):
        start = at
        size, at = _varint(body, at)
        end = at + size
        if size < 0 or end > len(body):
            raise Malformed(f"a record has {size} bytes, but only {len(body) - at} are left")
        time_delta, at = _varint(body, at + 1)  # skips the attributes, which are unused
        offset_delta, at = _varint(body, at)
        key_size, at = _varint(body, at)
        key = None if key_size < 0 else body[at : at + key_size]
        at += max(key_size, 0)
        value_size, at = _varint(body, at)
        if at + max(value_size, 0) > end:
            raise Malformed("a record's key or value is longer than the record")
        yield RawRecord(
            batch.base_offset + offset_delta, batch.base_timestamp + time_delta, key, value_size < 0, body[start:end]
        )
        at = end
    if at != len(body):
        raise Malformed(f"there are {len(body) - at} bytes after the last record")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a zigzag varint at position `at`. Return its value and the position after it."""
    try:
        byte = data[at]
        if byte < 0x80:  # nearly always
            return (byte >> 1) ^ -(byte & 1), at + 1
        value, shift = byte & 0x7F, 7
        while byte >= 0x80:
            at += 1
            byte = data[at]
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 70:
                raise Malformed("a varint has more than ten bytes")
    except IndexError:
        raise Malformed("a record is truncated") from None
    return (value >> 1) ^ -(value & 1), at + 1


NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
OPENED_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of a decompressed body, because a malicious megabyte could expand to a gigabyte."""
_XERIAL = b"\x82SNAPPY\0"
_XERIAL_HEADER_BYTES = 16


def decompress(codec: int, body: bytes | memoryview) -> memoryview:
    """Decompress the records of a batch. Raises `Malformed` for invalid or too large data."""
    if codec == NONE:
        return memoryview(body)
    import cramjam

    try:
        return _OPEN[codec](body)
    except (zlib.error, cramjam.DecompressionError, ValueError, struct.error) as error:
        raise Malformed(f"compressed records (codec {codec}): {error}") from None


def compress_gzip(body: bytes) -> bytes:
    """Compress the records of a rewritten batch with gzip, because all clients support it."""
    compressor = zlib.compressobj(level=6, wbits=31)
    return compressor.compress(body) + compressor.flush()


def _gunzip(body: bytes | memoryview) -> memoryview:
    decompressor = zlib.decompressobj(wbits=31)
    data = decompressor.decompress(body, OPENED_BYTES_MAX)
    if not decompressor.eof:
        raise ValueError("the data are truncated or too large when decompressed")
    return memoryview(data)


def _snappy(body: bytes | memoryview) -> memoryview:
    """Decompress snappy, either raw or in blocks with the header that Java clients write."""
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
    """Decompress into a memory map of the maximum size, of which the system allocates only pages that are written."""
    out = mmap.mmap(-1, OPENED_BYTES_MAX)
    return memoryview(out)[: decompress(body, out)]


_OPEN: dict[int, Callable[[bytes | memoryview], memoryview]] = {
    GZIP: _gunzip,
    SNAPPY: _snappy,
    LZ4: _lz4,
    ZSTD: _zstd,
}
