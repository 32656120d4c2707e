"""Records inside a batch, with the fields that the broker needs: key, time and whether there is a value.

https://kafka.apache.org/documentation/#record
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headrace_broker.batch import RecordBatch
from headrace_broker.compression import decompress
from headrace_broker.errors import Malformed


class RawRecord(NamedTuple):
    """One record. Its fields are views into the batch, and are valid only as long as the batch."""

    offset: int
    timestamp: int
    key: memoryview | None
    tombstone: bool
    raw: memoryview
    """The record with its length, as in the batch. It is only valid in the same batch."""


def records(batch: RecordBatch) -> Iterator[RawRecord]:
    """Yield the batch's records in order. Raises `Malformed`, possibly after some records."""
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
    """Return a zigzag varint and the position after it."""
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
