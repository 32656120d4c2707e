"""Context managers for aiokafka's clients, and functions that read until enough records have arrived."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from headrace.producing import client_options

READ_TIMEOUT_S = 20.0
START_MS = int(time.time() * 1000) - 3_600_000
"""Time of the first record of a test: recent, because a round of retention may come at any moment."""


@contextlib.asynccontextmanager
async def producing(bus: str, **options: object) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(**client_options(bus), **{"enable_idempotence": True, **options})
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@contextlib.asynccontextmanager
async def consuming(bus: str, *topics: str, **options: object) -> AsyncIterator[AIOKafkaConsumer]:
    defaults: dict[str, object] = {
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "heartbeat_interval_ms": 300,
        "fetch_max_wait_ms": 200,
        "retry_backoff_ms": 50,
    }
    consumer = AIOKafkaConsumer(*topics, **client_options(bus), **{**defaults, **options})
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


@contextlib.asynccontextmanager
async def administering(bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(**client_options(bus))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def create(admin: AIOKafkaAdminClient, name: str, partitions: int, config: dict[str, str] | None = None) -> None:
    """Create a topic, and return once it can be used."""
    response = await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=config or {})])
    assert [code for _, code, *_ in response.topic_errors] == [0]
    await eventually(lambda: _is_listed(admin, name))


async def _is_listed(admin: AIOKafkaAdminClient, topic: str) -> bool:
    """Return whether the metadata lists `topic`, which may be a little later than the response to its creation."""
    (described,) = await admin.describe_topics([topic])
    return described["error_code"] == 0 and all(p["leader"] >= 0 for p in described["partitions"])


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until `holds` returns True, with ten calls a second. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.1)


async def take(consumer: AIOKafkaConsumer, count: int) -> list[ConsumerRecord]:
    """Return exactly the next `count` records. Raises `TimeoutError` if fewer arrive."""
    async with asyncio.timeout(READ_TIMEOUT_S):
        return [await consumer.getone() for _ in range(count)]


async def everything(bus: str, topic: str, **options: object) -> list[ConsumerRecord]:
    """Return all records of partition 0 from its start to its present end.

    The end is that of all records, because Kafka answers EndTxn a little before a reader of committed records may read
    the last ones.
    """
    partition = TopicPartition(topic, 0)
    async with consuming(bus, **{**options, "isolation_level": "read_uncommitted"}) as reader:
        end = (await reader.end_offsets([partition]))[partition]
    async with consuming(bus, **options) as consumer:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        records: list[ConsumerRecord] = []
        async with asyncio.timeout(READ_TIMEOUT_S):
            while await consumer.position(partition) < end:
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    records += batch
        return [record for record in records if record.offset < end]
