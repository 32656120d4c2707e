"""Retention and compaction on a live broker: off the event loop, restartable, without loss."""

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
from headrace_broker.readers import Readers
from tests.support.record_batches import Entry, batch, now_ms
from tests.unit.broker.conftest import Live
from tests.unit.broker.harness import split

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
        passes: list[cleanup.Pass] = []
        begin = cleanup.begin

        def noted(db: sqlite3.Connection, work: cleanup.Pass) -> None:
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
    """The event loop is never blocked for long while a large table is compacted."""
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
    """A record of an open transaction supersedes no earlier record, and neither do the records behind it."""
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
