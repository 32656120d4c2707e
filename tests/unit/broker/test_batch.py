"""Record batches, held against aiokafka's reader and writer."""

from __future__ import annotations

import contextlib

import pytest
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker import compression
from headrace_broker.batch import RecordBatch, marker, parse, parse_produced
from headrace_broker.errors import Code, Malformed, Rejected
from headrace_broker.records import records
from tests.support.record_batches import Entry, batch, corrupted, patched

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
ENTRIES = st.lists(
    st.tuples(st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=300)), min_size=1, max_size=20
)


def _read_by_aiokafka(raw: bytes) -> list[tuple[int, int, bytes | None, bytes | None]]:
    reader = DefaultRecordBatch(bytearray(raw))
    assert reader.validate_crc()
    return [(record.offset, record.timestamp, record.key, record.value) for record in reader]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@given(entries=ENTRIES, start=st.integers(0, 2**43))
def test_records_are_read_as_aiokafka_reads_them(codec: int, entries: list[Entry], start: int) -> None:
    times = [1_000 + 7 * number for number in range(len(entries))]
    stored = parse_produced(batch(entries, compression=codec, timestamps=times)).at(start)
    read = [
        (r.offset, r.timestamp, None if r.key is None else bytes(r.key), r.tombstone) for r in records(parse(stored))
    ]
    assert read == [(offset, time, key, value is None) for offset, time, key, value in _read_by_aiokafka(stored)]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_some_records_of_a_batch_keep_their_offsets(codec: int) -> None:
    entries: list[Entry] = [(b"%d" % number, b"v" * number) for number in range(10)]
    stored = parse(parse_produced(batch(entries, compression=codec, producer_id=5, epoch=1, sequence=0)).at(100))
    remaining = [record for record in records(stored) if record.offset % 3 == 0]
    body = b"".join(record.raw for record in remaining)
    codec = compression.GZIP if codec else compression.NONE
    smaller = stored.with_records(compression.compress_gzip(body) if codec else body, len(remaining), codec)
    assert [(offset, key) for offset, _, key, _ in _read_by_aiokafka(smaller)] == [
        (102, b"2"),
        (105, b"5"),
        (108, b"8"),
    ]
    again = parse(smaller)
    assert (again.last_offset, again.producer_id, again.base_sequence) == (109, 5, 0)


@pytest.mark.parametrize(("committed", "type_"), [(True, COMMIT_MARKER), (False, ABORT_MARKER)])
def test_markers_are_control_records(committed: bool, type_: object) -> None:
    raw = marker(committed=committed, producer_id=7, epoch=2, timestamp_ms=123).at(9)
    reader = DefaultRecordBatch(bytearray(raw))
    assert reader.validate_crc()
    assert reader.is_control_batch
    assert reader.is_transactional
    assert (reader.producer_id, reader.producer_epoch, reader.base_offset, reader.next_offset) == (7, 2, 9, 10)
    (record,) = reader
    assert ControlRecord.parse(record.key) == type_


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        pytest.param(b"", Code.INVALID_RECORD, id="empty"),
        pytest.param(batch()[:60], Code.INVALID_RECORD, id="cut"),
        pytest.param(batch() + b"x", Code.INVALID_RECORD, id="one byte more"),
        pytest.param(batch() + batch(), Code.INVALID_RECORD, id="two batches"),
        pytest.param(corrupted(batch()), Code.CORRUPT_MESSAGE, id="corrupted"),
        pytest.param(patched(batch(), magic=1), Code.UNSUPPORTED_FOR_MESSAGE_FORMAT, id="old magic"),
        pytest.param(patched(batch(), length=10), Code.INVALID_RECORD, id="wrong length"),
        pytest.param(patched(batch(), count=0), Code.INVALID_RECORD, id="no records"),
        pytest.param(patched(batch(), last_offset_delta=-1), Code.INVALID_RECORD, id="negative delta"),
        pytest.param(patched(batch(), attributes=0x08), Code.INVALID_TIMESTAMP, id="log append time"),
        pytest.param(patched(batch(), attributes=0x10), Code.INVALID_RECORD, id="transactional without a producer"),
        pytest.param(patched(batch(), attributes=0x07), Code.UNSUPPORTED_COMPRESSION, id="unknown compression"),
        pytest.param(patched(batch(), producer_id=1), Code.INVALID_RECORD, id="producer without an epoch"),
    ],
)
def test_refused(raw: bytes, code: Code) -> None:
    with pytest.raises(Rejected) as caught:
        parse_produced(raw)
    assert caught.value.code is code


@given(flip=st.integers(0), bit=st.integers(0, 7))
def test_any_changed_bit_under_the_checksum_is_noticed(flip: int, bit: int) -> None:
    raw = bytearray(batch())
    raw[17 + flip % (len(raw) - 17)] ^= 1 << bit
    with pytest.raises(Rejected):
        parse_produced(bytes(raw))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@given(body=st.binary(max_size=400))
def test_a_body_of_nonsense_is_malformed_and_nothing_worse(codec: int, body: bytes) -> None:
    raw = batch()[:61] + body
    nonsense = patched(raw, length=len(raw) - 12, attributes=codec)
    with contextlib.suppress(Malformed):
        assert len(list(records(parse(nonsense)))) == 1


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_small_body_cannot_become_a_large_one(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "OPENED_BYTES_MAX", 100_000)
    fits, bomb = (parse(batch([(b"k", bytes(size))], compression=codec)) for size in (90_000, 2_000_000))
    assert len(list(records(fits))) == 1
    with pytest.raises(Malformed):
        list(records(bomb))


def test_java_writes_snappy_in_blocks() -> None:
    from aiokafka.codec import snappy_encode

    data = bytes(range(256)) * 500
    for framed in (True, False):
        assert bytes(compression.decompress(compression.SNAPPY, snappy_encode(data, xerial_compatible=framed))) == data


def test_header_fields() -> None:
    raw = batch([(b"a", b"1"), (b"b", b"2")], producer_id=9, epoch=3, sequence=17, timestamps=[50, 40], compression=1)
    parsed = parse_produced(raw)
    assert isinstance(parsed, RecordBatch)
    assert (parsed.producer_id, parsed.producer_epoch, parsed.base_sequence) == (9, 3, 17)
    assert (parsed.count, parsed.last_offset_delta, parsed.max_timestamp, parsed.codec) == (2, 1, 50, 1)
    assert not parsed.transactional
    assert not parsed.control
