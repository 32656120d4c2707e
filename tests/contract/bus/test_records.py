"""Tests of produced records, of reads without a group, and of consumer groups.

Invalid records are refused. Reads without a group start at any offset or time, and wait at the end. Groups share
partitions, commit offsets, and can be inspected from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    CommitFailedError,
    IllegalGenerationError,
    MessageSizeTooLargeError,
    OffsetOutOfRangeError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import OffsetAndMetadata

from tests.contract.bus.conftest import CreateTopic
from tests.support.wire_client import START_MS, consuming, eventually, everything, producing, take


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_batches(bus: str, topic: str, compression: str) -> None:
    values = [b"%d " % number * 200 for number in range(100)]
    async with producing(bus, compression_type=compression, linger_ms=20) as producer:
        await asyncio.gather(*[await producer.send(topic, value) for value in values])
    assert [record.value for record in await everything(bus, topic)] == values


async def test_a_megabyte_is_taken_and_more_is_refused(bus: str, topic: str) -> None:
    large = os.urandom(1_040_000)
    async with producing(bus, max_request_size=4_000_000) as producer:
        await producer.send_and_wait(topic, large)
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait(topic, os.urandom(1_060_000))
    assert [record.value for record in await everything(bus, topic)] == [large]


async def test_a_topic_may_take_larger_and_smaller_messages(bus: str, create: CreateTopic) -> None:
    wide, narrow = await create(max_message_bytes=3_000_000), await create(max_message_bytes=2_000)
    async with producing(bus, max_request_size=4_000_000) as producer:
        await producer.send_and_wait(wide, os.urandom(2_500_000))
        await producer.send_and_wait(narrow, bytes(1_500))
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait(narrow, bytes(2_500))
    (record,) = await everything(bus, wide, max_partition_fetch_bytes=1_000)
    assert len(record.value) == 2_500_000


async def test_unknown_topic_is_refused_and_not_created(bus: str, unique: str, admin: AIOKafkaAdminClient) -> None:
    async with producing(bus, request_timeout_ms=500) as producer:
        with pytest.raises(UnknownTopicOrPartitionError):
            await producer.send_and_wait(unique, b"x")
        assert unique not in await admin.list_topics()


async def test_unacknowledged_records_arrive(bus: str, topic: str) -> None:
    async with producing(bus, enable_idempotence=False, acks=0) as producer:
        for number in range(20):
            await producer.send(topic, b"%d" % number)
        await producer.flush()
        await producer.client.fetch_all_metadata()  # same connection: what was sent before has been read

    async def arrived() -> bool:
        return len(await everything(bus, topic)) == 20

    await eventually(arrived)
    assert [record.value for record in await everything(bus, topic)] == [b"%d" % number for number in range(20)]


async def test_many_producers_at_once_keep_their_own_order(bus: str, topic: str) -> None:
    async def produce(name: int) -> None:
        async with producing(bus) as producer:
            await asyncio.gather(*[await producer.send(topic, b"%d:%d" % (name, n)) for n in range(100)])

    await asyncio.gather(*[produce(name) for name in range(5)])
    values = [record.value for record in await everything(bus, topic)]
    for name in range(5):
        assert [v for v in values if v.startswith(b"%d:" % name)] == [b"%d:%d" % (name, n) for n in range(100)]
    assert len(values) == 500


async def _fill(bus: str, topic: str, count: int, *, linger_ms: int = 0) -> None:
    async with producing(bus, linger_ms=linger_ms) as producer:
        sent = [await producer.send(topic, b"%d" % n, timestamp_ms=START_MS + 10 * n) for n in range(count)]
        await asyncio.gather(*sent)


@pytest.mark.parametrize(("after_ms", "offset"), [(-1000, 0), (0, 0), (1, 1), (420, 42), (985, 99), (991, None)])
@pytest.mark.parametrize("linger_ms", [0, 20])
async def test_first_offset_at_a_time(bus: str, topic: str, after_ms: int, offset: int | None, linger_ms: int) -> None:
    await _fill(bus, topic, 100, linger_ms=linger_ms)
    partition = TopicPartition(topic, 0)
    async with consuming(bus) as consumer:
        located = (await consumer.offsets_for_times({partition: START_MS + after_ms}))[partition]
    assert (located.offset if located else None) == offset
    if located:
        assert located.timestamp == START_MS + 10 * located.offset


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
