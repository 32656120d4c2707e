"""A damaged batch becomes one record with a mark; the records around it are read as usual."""

from __future__ import annotations

import random

import pytest
from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka import damage
from headrace_runtime.kafka.wire import Record, decode
from headrace_runtime.storage.blobs import BlobStore

_VALUES = 3
_BATCHES = 4


def _batch(first: int) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, 0, 1, 0, 0, 10_000)
    for number in range(_VALUES):
        builder.append(number, timestamp=1, key=b"k", value=b"value %d" % (first + number), headers=[])
    data = bytearray(builder.build())
    data[0:8] = first.to_bytes(8, "big")
    return bytes(data)


def _read(data: bytes) -> dict[int, object]:
    """Offset to the value, or to the word `damaged`."""
    unpacked = damage.Unpacked(TopicPartition("t", 0), damage.Batches(data), [], 0, None, None, True, 0)
    records: dict[int, object] = {}
    for record in unpacked:
        records[record.offset] = "damaged" if dict(record.headers).get(damage.HEADER) else record.value
    return records


def test_whole_batches_are_read_as_ever() -> None:
    data = b"".join(_batch(first) for first in range(0, 12, 3))
    assert _read(data) == {number: b"value %d" % number for number in range(12)}


def test_a_damaged_batch_costs_its_own_records_only() -> None:
    parts = [bytearray(_batch(first)) for first in range(0, 12, 3)]
    parts[1][-2] ^= 1
    records = _read(b"".join(parts))
    assert records == {n: b"value %d" % n for n in (0, 1, 2, 6, 7, 8, 9, 10, 11)} | {3: "damaged"}


def test_no_flipped_byte_is_silent() -> None:
    """The base offset and the leader's epoch are outside the checksum; the broker sets and guards them."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        parts = [bytearray(_batch(first)) for first in range(0, _BATCHES * _VALUES, _VALUES)]
        hit = rng.randrange(_BATCHES)
        parts[hit][rng.randrange(17, len(parts[hit]))] ^= 1 << rng.randrange(8)
        records = _read(b"".join(parts))
        assert "damaged" in records.values() or hit == _BATCHES - 1
        for offset, value in records.items():
            assert value in ("damaged", b"value %d" % offset)
        for offset in range(hit * _VALUES):
            assert records[offset] == b"value %d" % offset, "what is before it is there"


def test_an_answer_that_is_no_batch_passes_one_offset() -> None:
    assert _read(b"the broker answers CORRUPT_MESSAGE") == {0: "damaged"}


async def test_what_is_damaged_is_refused_with_its_offsets(tmp_path: object) -> None:
    record = Record("turns", 0, 3, None, b"x", ((damage.HEADER, b"offsets 3 to 5: its checksum"),))
    with pytest.raises(InvalidEvent, match="offsets 3 to 5") as refused:
        await decode(record, BlobStore(f"file://{tmp_path}"))
    assert refused.value.reason == "damaged_record"
