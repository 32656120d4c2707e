"""Transactions as aiokafka has them: atomic over partitions and offsets, fenced, invisible until committed."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import ProducerFenced

from tests.contract.bus.clients import consuming, eventually, everything, producing, take
from tests.contract.bus.conftest import CreateTopic

COMMITTED = {"isolation_level": "read_committed"}


async def test_committed_and_aborted(bus: str, topic: str, unique: str) -> None:
    async with producing(bus, transactional_id=unique) as producer:
        for number, commit in enumerate([True, False, True, False, False, True]):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % number)
            await (producer.commit_transaction() if commit else producer.abort_transaction())
    assert [record.value for record in await everything(bus, topic, **COMMITTED)] == [b"0", b"2", b"5"]
    assert len(await everything(bus, topic)) == 6


async def test_open_transactions_hold_back_read_committed_alone(bus: str, topic: str, unique: str) -> None:
    partition = TopicPartition(topic, 0)
    async with producing(bus, transactional_id=unique) as producer, producing(bus) as plain:
        await plain.send_and_wait(topic, b"before")
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"inside")
        await plain.send_and_wait(topic, b"behind")
        async with consuming(bus, **COMMITTED) as careful, consuming(bus) as eager:
            careful.assign([partition])
            eager.assign([partition])
            assert (await careful.end_offsets([partition]))[partition] == 1
            assert (await eager.end_offsets([partition]))[partition] == 3
            assert [record.value for record in await take(eager, 3)] == [b"before", b"inside", b"behind"]
            assert [record.value for record in await take(careful, 1)] == [b"before"]
            waiting = asyncio.create_task(take(careful, 2))
            await producer.commit_transaction()
            assert [record.value for record in await waiting] == [b"inside", b"behind"]


async def test_several_partitions_and_offsets_in_one(bus: str, create: CreateTopic, unique: str) -> None:
    source, target = await create(), await create(partitions=3)
    group, partition = f"{unique}-group", TopicPartition(source, 0)
    async with consuming(bus, group_id=group) as consumer, producing(bus, transactional_id=unique) as producer:
        consumer.assign([partition])
        for commit in (False, True):
            await producer.begin_transaction()
            for number in range(3):
                await producer.send(target, b"%d" % commit, partition=number)
            await producer.send_offsets_to_transaction({partition: 7}, group)
            assert await consumer.committed(partition) is None
            await (producer.commit_transaction() if commit else producer.abort_transaction())

        async def moved() -> bool:
            offset: int | None = await consumer.committed(partition)
            return offset == 7

        await eventually(moved)  # Kafka answers EndTxn a little before the group has them
    async with consuming(bus, **COMMITTED) as reader:
        reader.assign([TopicPartition(target, number) for number in range(3)])
        records = await take(reader, 3)
    assert sorted((record.partition, record.value) for record in records) == [(0, b"1"), (1, b"1"), (2, b"1")]


async def test_the_successor_aborts_and_fences(bus: str, topic: str, unique: str) -> None:
    async with producing(bus, transactional_id=unique) as old:
        await old.begin_transaction()
        await old.send_and_wait(topic, b"of the old one")
        async with producing(bus, transactional_id=unique) as new:
            with pytest.raises(ProducerFenced):
                await old.send_and_wait(topic, b"too late")
            await new.begin_transaction()
            await new.send_and_wait(topic, b"of the new one")
            await new.commit_transaction()
            assert [record.value for record in await everything(bus, topic, **COMMITTED)] == [b"of the new one"]


async def test_a_forgotten_transaction_times_out(bus: str, topic: str, unique: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bus, transactional_id=unique, transaction_timeout_ms=1_000)
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"forgotten")
    partition = TopicPartition(topic, 0)
    async with consuming(bus, **COMMITTED) as consumer:
        assert (await consumer.end_offsets([partition]))[partition] == 0

        async def decided() -> bool:
            end: int = (await consumer.end_offsets([partition]))[partition]
            return end > 0

        await eventually(decided)  # Kafka looks every 10 s
    assert await everything(bus, topic, **COMMITTED) == []
    await producer._sender.close()
    await producer.client.close()
    producer._closed = True
