"""Model-based test that compares the log with a plain list for random writes, failures, restarts, deletions and
compaction."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace_broker import cleanup, reads
from headrace_broker.batch import parse_produced
from headrace_broker.cleanup import LogBounds
from headrace_broker.errors import Code, Rejected
from headrace_broker.topic_config import TopicConfig
from tests.support.wire_client import Entry, batch
from tests.unit.broker.conftest import Harness, Row, split

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
ENTRIES = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=5)), min_size=1, max_size=4)
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

    @rule(entries=ENTRIES, data=st.data(), compression=st.sampled_from([0, 1, 4]))
    def append(self, entries: list[Entry], data: st.DataObject, compression: int) -> None:
        times = data.draw(st.lists(TIMES, min_size=len(entries), max_size=len(entries)))
        at = self.broker.put(self.partition, *entries, timestamps=times, compression=compression)
        assert (at.base_offset, at.log_start) == (self.end, self.start)
        self._note(entries, times)

    @rule(producer=st.sampled_from([1, 2]), entries=ENTRIES, time=TIMES)
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

    @rule(producer=st.sampled_from([1, 2]), entries=ENTRIES)
    def leave_a_gap(self, producer: int, entries: list[Entry]) -> None:
        if producer not in self.sequences:
            return
        raw = batch(entries, producer_id=producer, epoch=0, sequence=self.sequences[producer] + 1)
        with pytest.raises(Rejected) as caught:
            self.broker.append(self.partition, raw)
        assert caught.value.code is Code.OUT_OF_ORDER_SEQUENCE

    @rule(entries=ENTRIES)
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
        self.broker.close()
        self.broker.open()

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
    @rule(data=st.data(), entries=ENTRIES, time=TIMES)
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
