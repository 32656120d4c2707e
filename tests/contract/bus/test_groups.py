"""Consumer groups: sharing partitions, committed offsets, lag, and looking at groups from outside."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CommitFailedError, IllegalGenerationError, UnknownMemberIdError
from aiokafka.structs import OffsetAndMetadata

from tests.contract.bus.clients import consuming, producing, take
from tests.contract.bus.conftest import CreateTopic


async def _assigned(consumer: AIOKafkaConsumer, count: int) -> set[TopicPartition]:
    """Wait until the consumer has exactly `count` partitions."""
    async with asyncio.timeout(20):
        while len(consumer.assignment()) != count:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await consumer.getone()
    return set(consumer.assignment())


async def test_two_members_share_and_the_survivor_takes_over(bus: str, create: CreateTopic, unique: str) -> None:
    topic = await create(partitions=4)
    async with consuming(bus, topic, group_id=unique) as first:
        assert len(await _assigned(first, 4)) == 4
        async with consuming(bus, topic, group_id=unique) as second:
            first_partitions, second_partitions = await asyncio.gather(_assigned(first, 2), _assigned(second, 2))
            assert first_partitions | second_partitions == {TopicPartition(topic, number) for number in range(4)}
        assert len(await _assigned(first, 4)) == 4


async def test_a_group_goes_on_where_it_committed(bus: str, topic: str, unique: str) -> None:
    async with producing(bus) as producer:
        for number in range(10):
            await producer.send_and_wait(topic, b"%d" % number)
    async with consuming(bus, topic, group_id=unique) as consumer:
        await take(consumer, 4)
        await consumer.commit({TopicPartition(topic, 0): OffsetAndMetadata(4, "note")})
    async with consuming(bus, topic, group_id=unique) as consumer:
        assert await consumer.committed(TopicPartition(topic, 0)) == 4
        assert [record.offset for record in await take(consumer, 6)] == [4, 5, 6, 7, 8, 9]


async def test_lag_as_admin_sees_it(bus: str, topic: str, unique: str, admin: AIOKafkaAdminClient) -> None:
    partition = TopicPartition(topic, 0)
    async with producing(bus) as producer, consuming(bus, topic, group_id=unique) as consumer:
        for number in range(10):
            await producer.send_and_wait(topic, b"%d" % number)
        await take(consumer, 3)
        await consumer.commit()
        committed = await admin.list_consumer_group_offsets(unique)
        end = (await consumer.end_offsets([partition]))[partition]
    assert end - committed[partition].offset == 7


async def test_a_group_without_offsets_has_none(bus: str, topic: str, unique: str) -> None:
    async with consuming(bus, topic, group_id=unique) as consumer:
        assert await consumer.committed(TopicPartition(topic, 0)) is None


async def test_manual_assignment_with_committed_offsets(bus: str, topic: str, unique: str) -> None:
    partition = TopicPartition(topic, 0)
    async with producing(bus) as producer:
        for number in range(5):
            await producer.send_and_wait(topic, b"%d" % number)
    async with consuming(bus, group_id=unique) as consumer:
        consumer.assign([partition])
        await take(consumer, 2)
        await consumer.commit({partition: 2})
    async with consuming(bus, group_id=unique) as consumer:
        consumer.assign([partition])
        (record,) = await take(consumer, 1)
        assert record.offset == 2


async def test_a_member_that_was_removed_cannot_commit(bus: str, create: CreateTopic, unique: str) -> None:
    topic = await create(partitions=2)
    async with consuming(bus, topic, group_id=unique) as member:
        await _assigned(member, 2)
        async with consuming(bus, group_id=unique) as stranger:
            stranger.assign([TopicPartition(topic, 0)])
            with pytest.raises((CommitFailedError, UnknownMemberIdError, IllegalGenerationError)):
                await stranger.commit({TopicPartition(topic, 0): 1})
        assert await member.committed(TopicPartition(topic, 0)) is None


async def test_list_and_describe(bus: str, create: CreateTopic, unique: str, admin: AIOKafkaAdminClient) -> None:
    topic = await create(partitions=2)
    async with consuming(bus, topic, group_id=unique, client_id="reader-1") as consumer:
        await _assigned(consumer, 2)
        assert (unique, "consumer") in await admin.list_consumer_groups()
        (response,) = await admin.describe_consumer_groups([unique])
        ((code, group, state, protocol_type, protocol, members, *_),) = response.groups
        assert (code, group, state, protocol_type, protocol) == (0, unique, "Stable", "consumer", "roundrobin")
        ((_, client_id, host, metadata, assignment),) = members
        assert (client_id, host) == ("reader-1", "/127.0.0.1")
        assert topic.encode() in metadata
        assert topic.encode() in assignment
    (response,) = await admin.describe_consumer_groups([unique])
    assert response.groups[0][2] == "Empty"


async def test_unknown_groups_are_dead(bus: str, unique: str, admin: AIOKafkaAdminClient) -> None:
    (response,) = await admin.describe_consumer_groups([unique])
    assert response.groups[0][2] == "Dead"


async def test_a_static_member_returns_without_a_rebalance(bus: str, create: CreateTopic, unique: str) -> None:
    topic = await create(partitions=2)
    options = {"group_id": unique, "session_timeout_ms": 15_000}
    async with consuming(bus, topic, **options, group_instance_id="a") as first:
        await _assigned(first, 2)
        async with consuming(bus, topic, **options, group_instance_id="b") as second:
            first_partitions, second_partitions = await asyncio.gather(_assigned(first, 1), _assigned(second, 1))
            generation = first._coordinator.generation
        async with consuming(bus, topic, **options, group_instance_id="b") as again:
            assert await _assigned(again, 1) == second_partitions
            assert set(first.assignment()) == first_partitions
            assert again._coordinator.generation == first._coordinator.generation == generation
