"""Tests of record batches, of the log by named cases, and of the log against a plain list in random orders.

Record batches are compared with the reader and the writer of aiokafka. The random orders have writes, failures,
restarts, deletions and compaction.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace_broker import batch as record_batches
from headrace_broker import cleanup, reads
from headrace_broker.batch import build_transaction_marker, parse, parse_produced, records
from headrace_broker.cleanup import LogBounds
from headrace_broker.errors import Code, Malformed, Rejected
from headrace_broker.store_format import OFFSET_MAX
from headrace_broker.topic_config import TopicConfig
from tests.support.wire_client import Entry, batch, corrupted, patched
from tests.unit.broker.conftest import Harness, Row, split

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


def test_the_producers_of_a_topic_that_was_deleted_are_forgotten_and_no_others(broker: Harness) -> None:
    deleted, remaining = *broker.topic("gone"), *broker.topic("kept")
    assert broker.put_once(deleted, producer=remaining) == 0

    def all_in_one_commit() -> None:
        for partition, producer in ((remaining, deleted), (deleted, 7)):
            once = parse_produced(batch(producer_id=producer, epoch=0, sequence=0))
            broker.log.append(partition, once, 0)
        broker.topics.delete("gone")

    broker.run(all_in_one_commit)
    assert broker.log.producer(deleted, remaining) is broker.log.producer(deleted, 7) is None
    assert broker.put_once(remaining, producer=deleted) == 0, "a duplicate"
    assert broker.put_once(remaining, producer=deleted, sequence=1) == 1
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


KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
KEYED_ENTRIES = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=5)), min_size=1, max_size=4)
TIMES = st.integers(1, 50)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
TRANSACTIONS = ("tx-0", "tx-1")


@dataclass
class Record:
    """A record that the model holds. `state` is committed, open or aborted."""

    row: Row
    state: str = "committed"
    owner: int = -1


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-log-", dir=MEMORY))
        self.broker = Harness(self.folder)
        self.model: list[Record] = []
        self.start = self.end = 0
        self.sequences: dict[int, int] = {}
        self.sent: dict[int, list[tuple[bytes, int]]] = {}
        self.sessions: dict[str, tuple[int, int]] = {}
        self.begun: set[str] = set()

    def teardown(self) -> None:
        self.broker.close()
        shutil.rmtree(self.folder)

    @initialize()
    def create(self) -> None:
        (self.partition,) = self.broker.topic(config=TopicConfig("compact,delete"))

    def _note(self, entries: list[Entry], times: list[int], state: str = "committed", owner: int = -1) -> None:
        for (key, value), time in zip(entries, times, strict=True):
            self.model.append(Record(Row(self.end, time, key, value), state, owner))
            self.end += 1

    @rule(entries=KEYED_ENTRIES, data=st.data(), compression=st.sampled_from([0, 1, 4]))
    def append(self, entries: list[Entry], data: st.DataObject, compression: int) -> None:
        times = data.draw(st.lists(TIMES, min_size=len(entries), max_size=len(entries)))
        at = self.broker.put(self.partition, *entries, timestamps=times, compression=compression)
        assert (at.base_offset, at.log_start) == (self.end, self.start)
        self._note(entries, times)

    @rule(producer=st.sampled_from([1, 2]), entries=KEYED_ENTRIES, time=TIMES)
    def append_once(self, producer: int, entries: list[Entry], time: int) -> None:
        sequence = self.sequences.get(producer, 0)
        times = [time] * len(entries)
        raw = batch(entries, producer_id=producer, epoch=0, sequence=sequence, timestamps=times)
        assert self.broker.append(self.partition, raw).base_offset == self.end
        self.sequences[producer] = sequence + len(entries)
        self.sent.setdefault(producer, []).append((raw, self.end))
        self._note(entries, times)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        producer = data.draw(st.sampled_from(sorted(self.sent)))
        raw, offset = data.draw(st.sampled_from(self.sent[producer][-5:]))
        assert self.broker.append(self.partition, raw).base_offset == offset

    @rule(producer=st.sampled_from([1, 2]), entries=KEYED_ENTRIES)
    def leave_a_gap(self, producer: int, entries: list[Entry]) -> None:
        if producer not in self.sequences:
            return
        raw = batch(entries, producer_id=producer, epoch=0, sequence=self.sequences[producer] + 1)
        with pytest.raises(Rejected) as caught:
            self.broker.append(self.partition, raw)
        assert caught.value.code is Code.OUT_OF_ORDER_SEQUENCE

    @rule(entries=KEYED_ENTRIES)
    def disk_full(self, entries: list[Entry]) -> None:
        raw = parse_produced(batch(entries))
        once = parse_produced(batch(entries, producer_id=1, epoch=0, sequence=self.sequences.get(1, 0)))
        self.broker.fail(
            lambda: (
                self.broker.log.append(self.partition, raw, 0),
                self.broker.log.append(self.partition, once, 0),
                [self.broker.transactions.begin_session(name, 1000, 0) for name in TRANSACTIONS],
            )
        )

    @rule()
    def restart(self) -> None:
        self.broker.restart()

    @rule(name=st.sampled_from(TRANSACTIONS))
    def take_over(self, name: str) -> None:
        old = self.sessions.get(name)
        session = self.broker.run(lambda: self.broker.transactions.begin_session(name, 10_000, 0))
        if old is not None:
            assert session == (old[0], old[1] + 1)
            self._end(name, "aborted")
        self.sessions[name] = session
        self.sequences[session[0]] = 0
        self.sent.pop(session[0], None)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), entries=KEYED_ENTRIES, time=TIMES)
    def append_in_transaction(self, data: st.DataObject, entries: list[Entry], time: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        producer, epoch = self.sessions[name]
        transactions = self.broker.transactions
        self.broker.run(lambda: transactions.add_partitions(name, producer, epoch, {self.partition}, 0))
        sequence, times = self.sequences[producer], [time] * len(entries)
        raw = batch(entries, producer_id=producer, epoch=epoch, sequence=sequence, transactional=True, timestamps=times)
        self.broker.run(lambda: transactions.check_append(name, self.partition, producer, epoch))
        assert self.broker.append(self.partition, raw).base_offset == self.end
        self.sequences[producer] += len(entries)
        self.begun.add(name)
        self._note(entries, times, "open", producer)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), commit=st.booleans())
    def end_transaction(self, data: st.DataObject, commit: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.begun)))
        self.broker.run(lambda: self.broker.transactions.end(name, *self.sessions[name], commit=commit, now_ms=0))
        self._end(name, "committed" if commit else "aborted")

    def _end(self, name: str, state: str) -> None:
        if name not in self.begun:
            return
        self.begun.discard(name)
        for record in self.model:
            if record.state == "open" and record.owner == self.sessions[name][0]:
                record.state = state
        self.end += 1

    @rule(oldest=TIMES)
    def expire(self, oldest: int) -> None:
        stable = self.broker.log.partition(self.partition).stable
        bounds = LogBounds(self.partition, self.start, stable, 0)
        cut = cleanup.retention_offset(self.broker.reader, bounds, TopicConfig(retention_ms=0), oldest)
        if cut > self.start:
            self.broker.run(lambda: self.broker.upkeep.cut(self.partition, cut))
            assert all(r.row.timestamp < oldest for r in self.model if r.row.offset < cut)
            self.model = [record for record in self.model if record.row.offset >= cut]
            self.start = cut

    @rule(keys_max=st.sampled_from([1, 3, 10**6]))
    def compact(self, keys_max: int) -> None:
        table = self._table()
        limit = self.broker.compact(self.partition, keys_max=keys_max).limit
        left = {row.offset: row for row in self.broker.rows(self.partition)}
        by_offset = {record.row.offset: record for record in self.model}
        assert left.items() <= {offset: record.row for offset, record in by_offset.items()}.items()
        assert all(offset in left for offset in by_offset if offset >= limit)
        assert not [offset for offset in left if offset < limit and by_offset[offset].state == "aborted"]
        if keys_max == 10**6:
            keys = [row.key for row in left.values() if row.offset < limit]
            assert len(keys) == len(set(keys))
        self.model = [record for record in self.model if record.row.offset in left]
        assert self._table() == table

    def _table(self) -> dict[bytes | None, bytes | None]:
        return {r.row.key: r.row.value for r in self.model if r.state == "committed"}

    @rule(data=st.data(), bytes_max=st.integers(1, 500))
    def fetch_anywhere(self, data: st.DataObject, bytes_max: int) -> None:
        offset = data.draw(st.integers(self.start, self.end))
        got = self.broker.fetch(self.partition, offset, bytes_max=bytes_max)
        batches = split(got.records)
        assert len(got.records) <= bytes_max or len(batches) == 1
        if batches:
            assert batches[0].last_offset >= offset
        else:
            assert not [record for record in self.model if record.row.offset >= offset]
        first = [record.row for record in self.model if record.row.offset >= offset]
        assert self.broker.rows(self.partition, offset) == first

    @rule(time=st.integers(1, 51))
    def find_time(self, time: int) -> None:
        located = reads.offset_at_time(self.broker.reader, self.partition, self.start, self.end, time)
        later = [(r.row.offset, r.row.timestamp) for r in self.model if r.row.timestamp >= time]
        assert located == (later[0] if later else (-1, -1))

    @invariant()
    def readers_see_the_model(self) -> None:
        if not hasattr(self, "partition"):
            return
        partition = self.broker.log.partition(self.partition)
        assert (partition.start, partition.end) == (self.start, self.end)
        assert self.broker.rows(self.partition) == [record.row for record in self.model]
        undecided = [record.row.offset for record in self.model if record.state == "open"]
        assert partition.stable <= min(undecided, default=self.end)
        committed = [r.row for r in self.model if r.state == "committed" and r.row.offset < partition.stable]
        assert self.broker.rows(self.partition, self.start, committed=True) == committed
        (size,) = self.broker.reader.execute("SELECT coalesce(sum(length(payload)), 0) FROM batches").fetchone()
        assert partition.bytes == size


LogMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLog = LogMachine.TestCase
