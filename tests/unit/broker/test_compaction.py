"""Tests of compaction and retention.

Compaction removes superseded records, protects all others, and has a bounded cost. On a live broker, retention and
compaction run off the event loop, continue after a restart, and lose no record. `test_log.py` tests random
orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator

import pytest

from headrace_broker import cleanup
from headrace_broker.batch import records
from headrace_broker.broker import Broker
from headrace_broker.errors import Code
from headrace_broker.maintenance import Maintenance
from headrace_broker.protocol.fetch import InitProducerIdRequest, InitProducerIdResponse
from headrace_broker.protocol.topics import DeleteTopicsRequest, DeleteTopicsResponse
from headrace_broker.protocol.transactions import (
    AddedTopic,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
)
from headrace_broker.reads import Readers
from headrace_broker.topic_config import TopicConfig
from tests.support.wire_client import Entry, batch, now_ms
from tests.unit.broker.conftest import Harness, Live, split


@pytest.fixture
def partition(broker: Harness) -> int:
    return broker.topic(config=TopicConfig("compact"))[0]


def _seen(broker: Harness, partition: int) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(row.offset, row.key, row.value) for row in broker.rows(partition)]


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_the_newest_of_each_key_stays_at_its_offset(broker: Harness, partition: int, codec: int) -> None:
    broker.put(partition, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"), compression=codec)
    broker.put(partition, (b"a", b"2"), compression=codec)
    broker.put(partition, (b"b", b"2"), compression=codec)
    broker.put(partition, (b"z", b"1"))
    broker.compact(partition)
    assert _seen(broker, partition) == [(2, b"c", b"1"), (3, b"a", b"2"), (4, b"b", b"2"), (5, b"z", b"1")]
    broker.put(partition, (b"a", b"3"))
    broker.put(partition, (b"z", b"2"))
    broker.compact(partition)
    assert _seen(broker, partition) == [
        (2, b"c", b"1"),
        (4, b"b", b"2"),
        (5, b"z", b"1"),
        (6, b"a", b"3"),
        (7, b"z", b"2"),
    ]


def test_the_last_batch_stays_whole_so_that_the_end_can_be_reached(broker: Harness, partition: int) -> None:
    broker.put(partition, (b"a", b"1"), (b"a", b"2"))
    broker.compact(partition)
    assert len(_seen(broker, partition)) == 2
    broker.put(partition, (b"a", b"3"), (b"a", b"4"))
    broker.compact(partition)
    assert _seen(broker, partition) == [(1, b"a", b"2"), (2, b"a", b"3"), (3, b"a", b"4")]


def test_records_without_a_key_stay(broker: Harness, partition: int) -> None:
    broker.put(partition, (None, b"1"), (b"a", b"1"), (None, b"2"))
    broker.put(partition, (b"a", b"2"))
    broker.put(partition, (b"z", b"1"))
    broker.compact(partition)
    assert [value for _, _, value in _seen(broker, partition)] == [b"1", b"2", b"2", b"1"]


@pytest.mark.parametrize("codec", [0, 1])
def test_what_was_compressed_stays_so(broker: Harness, partition: int, codec: int) -> None:
    broker.put(partition, (b"a", b"1"), (b"b", b"1"), compression=codec)
    broker.put(partition, (b"a", b"2"), compression=codec)
    broker.put(partition, (b"z", b"1"), compression=codec)
    broker.compact(partition)
    assert [stored.codec for stored in split(broker.fetch(partition).records)] == [codec] * 3


def test_what_a_pass_left_is_counted(broker: Harness, partition: int) -> None:
    for number in range(3):
        broker.put(partition, (b"a", b"%d" % number), (b"%d" % number, b""))
    broker.put(partition, (b"z", b"1"))
    limit = broker.compact(partition).limit
    left = sum(len(stored.raw) for stored in split(broker.fetch(partition).records) if stored.base_offset < limit)
    assert cleanup.progress(broker.reader, partition) == (6, left)
    assert cleanup.progress(broker.reader, partition + 1) == (0, 0), "of one that was deleted meanwhile"


def test_a_tombstone_outlives_its_key_until_it_is_old(broker: Harness, partition: int) -> None:
    broker.put(partition, (b"a", b"1"), timestamps=[1_000])
    broker.put(partition, (b"a", None), timestamps=[2_000])
    broker.put(partition, (b"z", b"1"), timestamps=[3_000])
    broker.compact(partition, tombstones_before_ms=2_000)
    assert _seen(broker, partition) == [(1, b"a", None), (2, b"z", b"1")]
    broker.put(partition, (b"z", b"2"), timestamps=[4_000])
    broker.compact(partition, tombstones_before_ms=2_001)
    assert _seen(broker, partition) == [(2, b"z", b"1"), (3, b"z", b"2")]


def test_what_was_aborted_supersedes_nothing(broker: Harness, partition: int) -> None:
    broker.put(partition, (b"a", b"kept"))
    _write_transaction(broker, partition, (b"a", b"aborted"), commit=False)
    _write_transaction(broker, partition, (b"b", b"committed"), commit=True)
    broker.put(partition, (b"z", b"end"))
    broker.compact(partition)
    assert _seen(broker, partition) == [(0, b"a", b"kept"), (3, b"b", b"committed"), (5, b"z", b"end")]
    assert broker.rows(partition, committed=True) == broker.rows(partition)
    assert broker.db.execute("SELECT count(*) FROM aborted").fetchone() == (0,)
    assert not [stored for stored in split(broker.fetch(partition).records) if stored.control]


def test_more_keys_than_fit_take_more_passes(broker: Harness, partition: int) -> None:
    for turn in range(2):
        for number in range(20):
            broker.put(partition, (b"%d" % number, b"%d" % turn))
    passes = 0
    while len(_seen(broker, partition)) > 20 and passes < 20:
        assert len(broker.compact(partition, keys_max=7).newest) <= 7
        passes += 1
    assert passes > 1
    broker.put(partition, (b"end", b""))
    while broker.compact(partition, keys_max=7).limit < cleanup.last_batch(broker.reader, partition):  # type: ignore[operator]
        pass
    assert {value for _, key, value in _seen(broker, partition) if key != b"end"} == {b"1"}


def test_a_batch_that_cannot_be_read_is_left_alone(broker: Harness, partition: int) -> None:
    broker.put(partition, (b"a", b"1"))
    nonsense = bytearray(batch([(b"a", b"2")]))
    nonsense[61] = 0x7F  # a record length that is wrong
    from tests.support.wire_client import patched

    broker.append(partition, patched(bytes(nonsense)))
    broker.put(partition, (b"a", b"3"))
    broker.put(partition, (b"z", b"end"))
    broker.compact(partition)
    assert [stored.base_offset for stored in split(broker.fetch(partition).records)] == [1, 2, 3]


def test_a_step_is_small_however_large_the_log_is(broker: Harness, partition: int) -> None:
    entries: list[Entry] = [(b"k", bytes(100_000))]
    for _ in range(20):
        broker.put(partition, *entries)
    work = cleanup.CompactionPass(partition, 0, 19, 0, -1, 1000)
    cleanup.begin(broker.reader, work)
    steps = 0
    while cleanup.index(broker.reader, work):
        steps += 1
    assert steps >= 6
    work.at = 0
    first = cleanup.rewrite(broker.reader, work)
    assert first is not None
    assert len(first) <= 3


def test_small_batches_are_read_many_at_a_time(broker: Harness, partition: int) -> None:
    for number in range(20):
        broker.put(partition, (b"%d" % number, b""))
    _write_transaction(broker, partition, (b"a", b""), commit=True)
    broker.put(partition, (b"behind the marker", b""))
    broker.put(partition, (b"z", b""))
    work = cleanup.CompactionPass(partition, 0, 23, 0, -1, 1000)
    cleanup.begin(broker.reader, work)
    assert cleanup.index(broker.reader, work)
    assert len(work.newest) == 22
    assert not cleanup.index(broker.reader, work)


def test_no_batch_is_left_out_between_two_steps(broker: Harness, partition: int) -> None:
    for turn in range(2):
        for number in range(6):
            broker.put(partition, (b"%d" % number, b"%d" % turn + bytes(30_000)))
    broker.put(partition, (b"z", b""))
    broker.compact(partition)
    assert [offset for offset, _, _ in _seen(broker, partition)] == [6, 7, 8, 9, 10, 11, 12]


def test_retention_and_compaction_at_once(broker: Harness, partition: int) -> None:
    """Compaction does not restore records that retention deleted after compaction had read them."""
    for number in range(4):
        broker.put(partition, (b"a", b"%d" % number), (b"%d" % number, b""))
    broker.put(partition, (b"z", b""))
    work = cleanup.CompactionPass(partition, 0, 8, 0, -1, 1000)
    while cleanup.index(broker.reader, work):
        pass
    work.at = 0
    changes = cleanup.rewrite(broker.reader, work)
    assert changes
    broker.run(lambda: broker.upkeep.cut(partition, 4))
    before = broker.log.partition(partition).bytes
    serialize = broker.run(lambda: broker.upkeep.replace(partition, changes))
    assert [offset for offset, _, _ in _seen(broker, partition)] == [5, 6, 7, 8]
    assert broker.log.partition(partition).bytes == before - serialize


def _write_transaction(broker: Harness, partition: int, *entries: Entry, commit: bool | None) -> None:
    """Write each entry as a batch of one transaction. The transaction stays open if `commit` is None."""
    transactions, name = broker.transactions, f"tx-{commit}"
    producer, epoch = broker.run(lambda: transactions.begin_session(name, 1000, 0))
    broker.run(lambda: transactions.add_partitions(name, producer, epoch, {partition}, 0))
    for sequence, entry in enumerate(entries):
        broker.put(partition, entry, producer_id=producer, epoch=epoch, sequence=sequence, transactional=True)
    if commit is not None:
        broker.run(lambda: transactions.end(name, producer, epoch, commit=commit, now_ms=0))


HOUR_MS = 3_600_000


@contextlib.asynccontextmanager
async def _maintenance(live: Live) -> AsyncIterator[Maintenance]:
    readers = Readers(live.store, 1)
    try:
        yield Maintenance(live.broker, readers)
    finally:
        readers.close()


def _bytes(broker: Broker, topic: str) -> int:
    return sum(view.bytes for view in broker.catalog.topics[topic].partitions)


async def test_a_round(live: Live) -> None:
    await live.create("old", retention_ms=HOUR_MS)
    await live.create("table", cleanup_policy="compact")
    await live.create("gone")
    async with live.client() as client, _maintenance(live) as maintenance:
        for age in (3 * HOUR_MS, 2 * HOUR_MS, 0):
            await client.produce("old", batch(timestamps=[now_ms() - age]))
        for number in range(50):
            await client.produce("table", batch([(b"%d" % (number % 5), b"%d" % number)]))
        await client.produce("gone", batch())
        await client.ask(DeleteTopicsRequest(("gone",), 1_000), DeleteTopicsResponse)
        await maintenance.round()
        old = live.broker.catalog.topics["old"].partitions[0]
        assert (old.start, old.end) == (2, 3)
        assert (await client.fetch("old", 0))[0] == Code.OFFSET_OUT_OF_RANGE
        assert await client.base_offsets("table") == [44, 45, 46, 47, 48, 49]
        count = await live.broker.readers.run(lambda db: db.execute("SELECT count(*) FROM batches").fetchone())
        assert count == (7,)
        assert live.broker.stats.compacted_bytes > 0
        assert live.broker.stats.expired_bytes > 0


async def test_a_clean_table_is_not_worked_on_again(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    await live.create("table", cleanup_policy="compact")
    async with live.client() as client, _maintenance(live) as maintenance:
        for number in range(30):
            await client.produce("table", batch([(b"%d" % number, b"x")]))
        await maintenance.round()
        passes: list[cleanup.CompactionPass] = []
        begin = cleanup.begin

        def noted(db: sqlite3.Connection, work: cleanup.CompactionPass) -> None:
            passes.append(work)
            begin(db, work)

        monkeypatch.setattr(cleanup, "begin", noted)
        await client.produce("table", batch([(b"0", b"y")]))
        await maintenance.round()
        assert not passes, "less than half of it is new"
        for number in range(40):
            await client.produce("table", batch([(b"%d" % (number % 30), b"y")]))
        await maintenance.round()
        assert len(passes) == 1
        assert len(await client.base_offsets("table")) == 31


async def test_clients_go_on_during_compaction(live: Live) -> None:
    """Compaction of a large table never blocks the event loop for long."""
    await live.create("table", cleanup_policy="compact", max_message_bytes=1_000_000)
    await live.create("t")
    async with live.client() as client, _maintenance(live) as maintenance:
        entries: list[Entry] = [(b"key-%d" % number, bytes(30)) for number in range(3_000)]
        for _ in range(8):
            assert (await client.produce("table", batch(entries)))[0] == Code.NONE
        before = _bytes(live.broker, "table")
        working = asyncio.create_task(maintenance.round())
        pauses = []
        while not working.done():
            started = time.perf_counter()
            await asyncio.sleep(0)
            pauses.append(time.perf_counter() - started)
            assert (await client.produce("t", batch()))[0] == Code.NONE
        await working
        assert _bytes(live.broker, "table") < before / 3
        assert len(pauses) > 10
        assert sorted(pauses)[len(pauses) * 9 // 10] < 0.05


async def test_compaction_that_is_interrupted_begins_again(live: Live) -> None:
    await live.create("table", cleanup_policy="compact")
    async with live.client() as client:
        for number in range(200):
            await client.produce("table", batch([(b"%d" % (number % 10), b"%d" % number)]))
        async with _maintenance(live) as maintenance:
            started = asyncio.create_task(maintenance.round())
            while not live.broker.stats.compacted_bytes and not started.done():  # noqa: ASYNC110 (no event for it)
                await asyncio.sleep(0)
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
        async with _maintenance(live) as maintenance:
            await maintenance.round()
        _, data = await client.fetch("table")
        values = {bytes(r.key or b""): r.offset for stored in split(data) for r in records(stored)}
        assert values == {b"%d" % key: 190 + key for key in range(10)}


async def test_compaction_stays_below_what_is_undecided(live: Live) -> None:
    """A record of an open transaction supersedes no earlier record, and neither do the records after it."""
    await live.create("table", cleanup_policy="compact")
    async with live.client() as client, _maintenance(live) as maintenance:
        session = await client.ask(InitProducerIdRequest("tx", 60_000), InitProducerIdResponse)
        owner = ("tx", session.producer_id, session.producer_epoch)
        await client.produce("table", batch([(b"key", b"decided")]))
        await client.ask(AddPartitionsToTxnRequest(*owner, (AddedTopic("table", (0,)),)), AddPartitionsToTxnResponse)
        undecided = batch(
            [(b"key", b"undecided")],
            transactional=True,
            producer_id=session.producer_id,
            epoch=session.producer_epoch,
            sequence=0,
        )
        assert (await client.produce("table", undecided, transactional_id="tx"))[0] == Code.NONE
        for number in range(10):
            await client.produce("table", batch([(b"key", b"%d" % number)]))
        await maintenance.round()
        assert await client.base_offsets("table") == list(range(12))
        await client.ask(EndTxnRequest(*owner, False), EndTxnResponse)
        await maintenance.round()
        assert await client.base_offsets("table") == [11, 12]


async def test_records_are_kept_whole_for_as_long_as_asked(live: Live) -> None:
    await live.create("table", cleanup_policy="compact", min_compaction_lag_ms=HOUR_MS)
    async with live.client() as client, _maintenance(live) as maintenance:
        for age in (3 * HOUR_MS, 2 * HOUR_MS, HOUR_MS // 2, HOUR_MS // 4):
            await client.produce("table", batch([(b"key", b"v")], timestamps=[now_ms() - age]))
        await maintenance.round()
        assert await client.base_offsets("table") == [1, 2, 3]


async def test_transactions_time_out(live: Live) -> None:
    await live.create("t")
    async with live.client() as client, _maintenance(live) as maintenance:
        session = await client.ask(InitProducerIdRequest("tx", 1), InitProducerIdResponse)
        owner = ("tx", session.producer_id, session.producer_epoch)
        await client.ask(AddPartitionsToTxnRequest(*owner, (AddedTopic("t", (0,)),)), AddPartitionsToTxnResponse)
        await asyncio.sleep(0.01)
        await maintenance.expire_transactions()
        ended = await client.ask(EndTxnRequest(*owner, True), EndTxnResponse)
        assert ended.error_code == Code.INVALID_PRODUCER_EPOCH
