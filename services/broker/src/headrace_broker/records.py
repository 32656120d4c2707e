"""The records inside a batch, as far as the broker needs them: key, time, whether there is a value.

https://kafka.apache.org/documentation/#record
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headrace_broker.batch import RecordBatch
from headrace_broker.compression import opened
from headrace_broker.errors import Malformed


class RawRecord(NamedTuple):
    """One record. Its fields are views into the batch: do not keep them longer than the batch."""

    offset: int
    timestamp: int
    key: memoryview | None
    tombstone: bool
    raw: memoryview
    """The record with its length in front, as it stands in the batch; valid in the same batch only."""


def records(batch: RecordBatch) -> Iterator[RawRecord]:
    """The batch's records in order. Raises `Malformed`, perhaps after some of them."""
    body = opened(batch.codec, batch.body)
    at = 0
    for _ in range(batch.count):
        start = at
        size, at = _varint(body, at)
        end = at + size
        if size < 0 or end > len(body):
            raise Malformed(f"a record of {size} bytes, {len(body) - at} left")
        time_delta, at = _varint(body, at + 1)  # after the attributes, which are unused
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
        raise Malformed(f"{len(body) - at} bytes after the last record")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A zigzag varint and where it ends."""
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
                raise Malformed("a varint of more than ten bytes")
    except IndexError:
        raise Malformed("a record is cut short") from None
    return (value >> 1) ^ -(value & 1), at + 1
