"""The trainer's place on a real bus: offsets of its own, holding back, reading again, and a bus that was replaced."""

from __future__ import annotations

import uuid

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_trainer.source import BusReplaced, KafkaSource
from tests.contract.bus.clients import administering


async def fill(bus: str) -> tuple[str, str]:
    """Two fresh topics: experiences with two partitions of five records, decisions with one of one."""
    suffix = uuid.uuid4().hex[:8]
    experiences, decisions = f"experiences-{suffix}", f"decisions-{suffix}"
    async with administering(bus) as admin:
        await admin.create_topics([NewTopic(experiences, 2, 1), NewTopic(decisions, 1, 1)])
    producer = AIOKafkaProducer(bootstrap_servers=bus)
    await producer.start()
    for number in range(10):
        await producer.send_and_wait(experiences, str(number).encode(), partition=number % 2)
    await producer.send_and_wait(decisions, b"d")
    await producer.stop()
    return experiences, decisions


@pytest.fixture
async def names(bus: str) -> tuple[str, str]:
    return await fill(bus)


async def collect(source: KafkaSource, count: int, limit: int = 100) -> list[Record]:
    records: list[Record] = []
    for _ in range(40):
        records += await source.poll(limit)
        if len(records) >= count:
            break
    return records


async def test_it_reads_from_the_offsets_it_is_given(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    await source.start({names[0]: {0: 2, 1: 4}, names[1]: {0: 1}})
    records = await collect(source, 4)
    await source.stop()
    assert sorted((r.topic, r.partition, r.offset) for r in records) == [
        (names[0], 0, 2), (names[0], 0, 3), (names[0], 0, 4), (names[0], 1, 4),
    ]  # fmt: skip


async def test_experiences_can_be_held_back_and_decisions_cannot(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    await source.start({})
    records = await collect(source, 1, limit=0)
    records += await source.poll(0)
    assert [record.value for record in records] == [b"d"]
    some = await source.poll(3)
    assert 0 < len(some) <= 3
    rest = await collect(source, 10 - len(some))
    await source.stop()
    assert sorted(int(record.value or b"") for record in [*some, *rest]) == list(range(10)), "each exactly once"


async def test_one_record_can_be_read_again(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    await source.start({})
    record = (await source.fetch([(1, 2)]))[1, 2]
    await source.stop()
    assert (record.partition, record.offset, record.value) == (1, 2, b"5")


async def test_a_bus_that_ends_before_our_offsets_is_not_ours(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    with pytest.raises(BusReplaced, match=r"ends at 5, but the lineage has read up to 6: bring the old bus back"):
        await source.start({names[0]: {0: 6}})
    assert not source.started


@pytest.mark.kafka
async def test_what_retention_took_is_counted_and_passed(kafka_bus: str) -> None:
    """On Kafka alone: the embedded broker has retention by time and no request to delete records."""
    names = await fill(kafka_bus)
    async with administering(kafka_bus) as admin:
        await admin.delete_records({TopicPartition(names[0], 0): RecordsToDelete(before_offset=3)})
    source = KafkaSource(BusSettings(address=kafka_bus), *names)
    await source.start({names[0]: {0: 1, 1: 5}, names[1]: {0: 1}})
    records = await collect(source, 2)
    assert await source.fetch([(0, 1)]) == {}
    await source.stop()
    assert [(r.partition, r.offset) for r in records] == [(0, 3), (0, 4)]


async def test_a_topic_that_is_not_there_is_unavailable(bus: str) -> None:
    source = KafkaSource(BusSettings(address=bus), "nowhere-at-all", "nor-here")
    with pytest.raises(Unavailable, match="nowhere-at-all"):
        await source.start({})
