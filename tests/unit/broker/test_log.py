"""Tests of record batches and of the log.

Record batches are compared with the reader and the writer of aiokafka. Each test of the log is one named case;
`test_log_model.py` tests random orders.
"""

from __future__ import annotations

import contextlib

import pytest
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker import batch as record_batches
from headrace_broker import log
from headrace_broker.batch import RecordBatch, build_transaction_marker, parse, parse_produced, records
from headrace_broker.errors import Code, Malformed, Rejected
from headrace_broker.store_format import OFFSET_MAX
from tests.support.wire_client import Entry, batch, corrupted, patched
from tests.unit.broker.conftest import Harness

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
    stored = parse_produced(batch(entries, compression=codec, timestamps=times)).with_base_offset(start)
    read = [
        (r.offset, r.timestamp, None if r.key is None else bytes(r.key), r.tombstone) for r in records(parse(stored))
    ]
    assert read == [(offset, time, key, value is None) for offset, time, key, value in _read_by_aiokafka(stored)]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_some_records_of_a_batch_keep_their_offsets(codec: int) -> None:
    entries: list[Entry] = [(b"%d" % number, b"v" * number) for number in range(10)]
    stored = parse(
        parse_produced(batch(entries, compression=codec, producer_id=5, epoch=1, sequence=0)).with_base_offset(100)
    )
    remaining = [record for record in records(stored) if record.offset % 3 == 0]
    body = b"".join(record.raw for record in remaining)
    codec = record_batches.GZIP if codec else record_batches.NONE
    smaller = stored.with_records(record_batches.compress_gzip(body) if codec else body, len(remaining), codec)
    assert [(offset, key) for offset, _, key, _ in _read_by_aiokafka(smaller)] == [
        (102, b"2"),
        (105, b"5"),
        (108, b"8"),
    ]
    again = parse(smaller)
    assert (again.last_offset, again.producer_id, again.base_sequence) == (109, 5, 0)


@pytest.mark.parametrize(("committed", "type_"), [(True, COMMIT_MARKER), (False, ABORT_MARKER)])
def test_markers_are_control_records(committed: bool, type_: object) -> None:
    raw = build_transaction_marker(committed=committed, producer_id=7, epoch=2, timestamp_ms=123).with_base_offset(9)
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
    monkeypatch.setattr(record_batches, "OPENED_BYTES_MAX", 100_000)
    fits, bomb = (parse(batch([(b"k", bytes(size))], compression=codec)) for size in (90_000, 2_000_000))
    assert len(list(records(fits))) == 1
    with pytest.raises(Malformed):
        list(records(bomb))


def test_java_writes_snappy_in_blocks() -> None:
    from aiokafka.codec import snappy_encode

    data = bytes(range(256)) * 500
    for framed in (True, False):
        assert (
            bytes(record_batches.decompress(record_batches.SNAPPY, snappy_encode(data, xerial_compatible=framed)))
            == data
        )


def test_header_fields() -> None:
    raw = batch([(b"a", b"1"), (b"b", b"2")], producer_id=9, epoch=3, sequence=17, timestamps=[50, 40], compression=1)
    parsed = parse_produced(raw)
    assert isinstance(parsed, RecordBatch)
    assert (parsed.producer_id, parsed.producer_epoch, parsed.base_sequence) == (9, 3, 17)
    assert (parsed.count, parsed.last_offset_delta, parsed.max_timestamp, parsed.codec) == (2, 1, 50, 1)
    assert not parsed.transactional
    assert not parsed.control


def _put(broker: Harness, partition: int, producer: int, sequence: int = 0, now_ms: int = 0) -> int:
    raw = batch(producer_id=producer, epoch=0, sequence=sequence)
    return broker.append(partition, raw, now_ms).base_offset


def _restart(broker: Harness) -> None:
    broker.close()
    broker.open()


def test_a_new_partition_is_what_a_restart_makes_of_it(broker: Harness) -> None:
    (partition,) = broker.topic()
    created = broker.log.partition(partition)
    _restart(broker)
    assert broker.log.partition(partition) == created


def test_a_topic_that_was_deleted_is_refused(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.run(lambda: broker.topics.delete("t"))
    with pytest.raises(Rejected) as caught:
        broker.put(partition, (b"k", b"v"))
    assert caught.value.code is Code.UNKNOWN_TOPIC_OR_PARTITION


def test_the_producers_of_a_topic_that_was_deleted_are_forgotten_and_no_others(broker: Harness) -> None:
    deleted, remaining = *broker.topic("gone"), *broker.topic("kept")
    assert _put(broker, deleted, producer=remaining) == 0

    def all_in_one_commit() -> None:
        for partition, producer in ((remaining, deleted), (deleted, 7)):
            once = parse_produced(batch(producer_id=producer, epoch=0, sequence=0))
            broker.log.append(partition, once, 0)
        broker.topics.delete("gone")

    broker.run(all_in_one_commit)
    assert broker.log.producer(deleted, remaining) is broker.log.producer(deleted, 7) is None
    assert _put(broker, remaining, producer=deleted) == 0, "a duplicate"
    assert _put(broker, remaining, producer=deleted, sequence=1) == 1
    assert broker.db.execute("SELECT count(*) FROM producers").fetchone() == (1,)


def test_the_end_of_a_transaction_in_a_topic_that_was_deleted_writes_nothing(broker: Harness) -> None:
    deleted, other = *broker.topic("gone"), *broker.topic("other")
    broker.run(lambda: broker.topics.delete("gone"))
    for partition in (deleted, other):
        broker.run(lambda at=partition: broker.log.end_transaction(at, 1, 0, commit=True, now_ms=0))  # type: ignore[misc]
    assert broker.log.partition(other).end == 0


def test_the_last_offset_is_used_and_none_behind_it(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.log.partition(partition).end = OFFSET_MAX - 3
    with pytest.raises(Rejected) as caught:
        broker.put(partition, *[(b"k", b"v")] * 4)
    assert caught.value.code is Code.POLICY_VIOLATION
    assert broker.put(partition, *[(b"k", b"v")] * 3).base_offset == OFFSET_MAX - 3
    assert broker.log.partition(partition).end == OFFSET_MAX
    with pytest.raises(Rejected):
        broker.put(partition, (b"k", b"v"))


@pytest.mark.parametrize(("sent", "stored"), [(-1, 77), (0, 0), (1, 1), (99, 99)])
def test_a_batch_without_a_time_has_that_of_its_arrival(broker: Harness, sent: int, stored: int) -> None:
    (partition,) = broker.topic()
    broker.append(partition, batch(max_timestamp=sent), now_ms=77)
    assert broker.log.partition(partition).max_timestamp == stored
    assert broker.db.execute("SELECT max_timestamp, reached_timestamp FROM batches").fetchone() == (stored, stored)


def test_a_producer_that_was_not_seen_for_long_is_forgotten(broker: Harness) -> None:
    (partition,) = broker.topic()
    _put(broker, partition, producer=1, now_ms=10)
    _put(broker, partition, producer=2, now_ms=20)
    broker.run(lambda: broker.log.forget_producers(20))
    assert broker.log.producer(partition, 1) is None
    assert _put(broker, partition, producer=2) == 1, "a duplicate"
    assert _put(broker, partition, producer=1) == 2


def test_a_producer_that_comes_back_in_the_commit_that_forgets_it_is_remembered(broker: Harness) -> None:
    """A producer that writes in the same commit that would expire its state is kept."""
    (partition,) = broker.topic()
    producer, epoch = broker.run(lambda: broker.transactions.begin_session("tx", 1000, 0))
    raw = batch(producer_id=producer, epoch=epoch, sequence=0)
    broker.append(partition, raw, now_ms=10)
    again = batch(producer_id=producer, epoch=epoch, sequence=1, transactional=True)

    def one_commit() -> None:
        broker.transactions.add_partitions("tx", producer, epoch, {partition}, 30)
        broker.log.append(partition, parse_produced(again), 30)
        broker.log.forget_producers(20)

    broker.run(one_commit)
    assert broker.append(partition, again, now_ms=30).base_offset == 1, "a duplicate"
    _restart(broker)
    assert broker.log.partition(partition).stable == 1, "its transaction is open"
    broker.run(lambda: broker.transactions.end("tx", producer, epoch, commit=True, now_ms=40))
    assert broker.log.partition(partition).stable == 3


def test_the_producers_that_were_used_last_are_kept_in_memory(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_PRODUCERS_CACHED", 2)
    (partition,) = broker.topic()
    for producer in (1, 2, 3):
        _put(broker, partition, producer)
    statements: list[str] = []
    broker.db.set_trace_callback(statements.append)
    states = [broker.log.producer(partition, producer) for producer in (2, 3)]
    broker.db.set_trace_callback(None)
    assert all(states)
    assert statements == [], "no query"
    assert broker.log.producer(partition, 1) is not None
