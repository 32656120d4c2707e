"""Reading without a group: assigned by hand, at any offset, by time, to the end and waiting there."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from tests.contract.bus.clients import consuming, producing, take
from tests.contract.bus.conftest import CreateTopic

START_MS = 1_700_000_000_000


async def _fill(bus: str, topic: str, count: int, *, linger_ms: int = 0) -> None:
    async with producing(bus, linger_ms=linger_ms) as producer:
        sent = [await producer.send(topic, b"%d" % n, timestamp_ms=START_MS + 10 * n) for n in range(count)]
        await asyncio.gather(*sent)


async def test_seek_to_any_offset(bus: str, topic: str) -> None:
    await _fill(bus, topic, 100, linger_ms=20)
    partition = TopicPartition(topic, 0)
    async with consuming(bus) as consumer:
        consumer.assign([partition])
        for offset in (99, 0, 42):
            consumer.seek(partition, offset)
            (record,) = await take(consumer, 1)
            assert (record.offset, record.value) == (offset, b"%d" % offset)


@pytest.mark.parametrize(
    ("time_ms", "offset"),
    [(0, 0), (START_MS, 0), (START_MS + 1, 1), (START_MS + 420, 42), (START_MS + 985, 99), (START_MS + 991, None)],
)
@pytest.mark.parametrize("linger_ms", [0, 20])
async def test_first_offset_at_a_time(bus: str, topic: str, time_ms: int, offset: int | None, linger_ms: int) -> None:
    await _fill(bus, topic, 100, linger_ms=linger_ms)
    partition = TopicPartition(topic, 0)
    async with consuming(bus) as consumer:
        located = (await consumer.offsets_for_times({partition: time_ms}))[partition]
    assert (located.offset if located else None) == offset
    if located:
        assert located.timestamp == START_MS + 10 * located.offset


async def test_begin_and_end(bus: str, create: CreateTopic) -> None:
    topic = await create(partitions=2)
    partitions = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    async with producing(bus) as producer:
        for _ in range(3):
            await producer.send_and_wait(topic, b"x", partition=1)
    async with consuming(bus) as consumer:
        assert await consumer.beginning_offsets(partitions) == dict.fromkeys(partitions, 0)
        assert await consumer.end_offsets(partitions) == {partitions[0]: 0, partitions[1]: 3}


async def test_outside_the_log(bus: str, topic: str) -> None:
    await _fill(bus, topic, 3)
    partition = TopicPartition(topic, 0)
    async with consuming(bus, auto_offset_reset="none") as consumer:
        consumer.assign([partition])
        consumer.seek(partition, 4)
        with pytest.raises(OffsetOutOfRangeError):
            await take(consumer, 1)


async def test_a_reader_at_the_end_hears_of_new_records_at_once(bus: str, topic: str) -> None:
    async with consuming(bus, fetch_max_wait_ms=5_000) as consumer, producing(bus) as producer:
        consumer.assign([TopicPartition(topic, 0)])
        await producer.send_and_wait(topic, b"first")
        await take(consumer, 1)
        waiting = asyncio.create_task(take(consumer, 1))
        await asyncio.sleep(0.3)  # its Fetch waits at the broker now
        started = time.monotonic()
        await producer.send_and_wait(topic, b"second")
        (record,) = await waiting
        assert record.value == b"second"
        assert time.monotonic() - started < 2.5  # far below the 5 s that the Fetch would wait


async def test_small_fetches_lose_nothing(bus: str, topic: str) -> None:
    async with producing(bus) as producer:
        for number in range(40):
            await producer.send_and_wait(topic, b"%d" % number + bytes(1_000))
    options = {"max_partition_fetch_bytes": 1_500, "fetch_max_bytes": 2_000}
    async with consuming(bus, **options) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        records = await take(consumer, 40)
    assert [record.offset for record in records] == list(range(40))


async def test_many_partitions_in_one_fetch(bus: str, create: CreateTopic) -> None:
    topic = await create(partitions=8)
    async with producing(bus) as producer:
        for number in range(80):
            await producer.send_and_wait(topic, b"%d" % number, partition=number % 8)
    async with consuming(bus) as consumer:
        consumer.assign([TopicPartition(topic, number) for number in range(8)])
        records = await take(consumer, 80)
    for number in range(8):
        values = [int(record.value) for record in records if record.partition == number]
        assert values == list(range(number, 80, 8))
