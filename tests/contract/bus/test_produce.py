"""Records that a producer may send, and the refusals of others."""

from __future__ import annotations

import asyncio
import os

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import MessageSizeTooLargeError, UnknownTopicOrPartitionError

from tests.contract.bus.clients import eventually, everything, producing
from tests.contract.bus.conftest import CreateTopic


async def test_records_come_back_in_order_with_key_headers_and_time(bus: str, topic: str) -> None:
    async with producing(bus) as producer:
        for number in range(50):
            headers = [("ce_id", str(number).encode()), ("empty", b"")]
            await producer.send(topic, b"v%d" % number, b"k", headers=headers, timestamp_ms=1_700_000_000_000 + number)
        await producer.flush()
    records = await everything(bus, topic)
    assert [record.value for record in records] == [b"v%d" % number for number in range(50)]
    assert [record.offset for record in records] == list(range(50))
    assert records[7].headers == (("ce_id", b"7"), ("empty", b""))
    assert records[7].timestamp == 1_700_000_000_007
    assert records[7].key == b"k"


async def test_acknowledgement_names_the_offset(bus: str, topic: str) -> None:
    async with producing(bus) as producer:
        offsets = [(await producer.send_and_wait(topic, b"x")).offset for _ in range(3)]
    assert offsets == [0, 1, 2]


async def test_no_key_and_no_value_are_not_empty_ones(bus: str, topic: str) -> None:
    async with producing(bus) as producer:
        for key, value in ((None, b""), (b"", None), (b"", b"")):
            await producer.send_and_wait(topic, value, key)
    assert [(record.key, record.value) for record in await everything(bus, topic)] == [
        (None, b""),
        (b"", None),
        (b"", b""),
    ]


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


async def test_keys_choose_partitions_as_everywhere(bus: str, create: CreateTopic) -> None:
    topic = await create(partitions=4)
    async with producing(bus) as producer:
        sent = [(await producer.send_and_wait(topic, b"x", key)).partition for key in (b"a", b"b", b"session-7")]
        again = [(await producer.send_and_wait(topic, b"x", key)).partition for key in (b"a", b"b", b"session-7")]
    assert sent == again


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
