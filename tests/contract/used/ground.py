"""Ground of a scenario: a bus, and the same clients of it that the services use.

A scenario is written once. It gets topics, producers, consumers and hosts from a `Ground`, and states the promises of
every bus. `grounds.py` has the grounds: the simulated bus, the embedded broker, Apache Kafka.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore

WAIT_MAX_S = 60.0


class Ground(Protocol):
    """`draw` is the scenario's source of chance; the seed is printed."""

    bus: BusSettings
    folder: Path
    draw: random.Random

    async def create(self, partitions: int) -> str:
        """A topic that is empty; returns its name."""

    def spawn(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run a coroutine as a process of its own would, concurrently with the scenario."""


Scenario = Callable[[Ground], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def producing(ground: Ground) -> AsyncIterator[AIOKafkaProducer]:
    """The client inside `EventProducer`, with the options that it has there."""
    producer = EventProducer(ground.bus, "used", BlobStore(f"memory://{ground.folder.name}"))
    await producer.start()
    try:
        yield producer._producer
    finally:
        await producer.stop()


@contextlib.asynccontextmanager
async def consuming(ground: Ground, **options: object) -> AsyncIterator[AIOKafkaConsumer]:
    """Start a consumer with our defaults and no assignment."""
    reader = consumer(ground.bus, "used", **options)
    await reader.start()
    try:
        yield reader
    finally:
        await reader.stop()


async def send(producer: AIOKafkaProducer, topic: str, values: Iterable[bytes], partition: int = 0) -> None:
    """Send all in order to one partition and wait until the bus has them."""
    await asyncio.gather(*[await producer.send(topic, value, b"k", partition, headers=[]) for value in values])


async def poll(reader: AIOKafkaConsumer, *partitions: TopicPartition, records_max: int | None = None) -> list[Record]:
    batches = await reader.getmany(*partitions, timeout_ms=100, max_records=records_max)
    return [record_of(message) for messages in batches.values() for message in messages]


async def take(reader: AIOKafkaConsumer, count: int) -> list[Record]:
    """The next `count` records, as they come; fails when there are more, or when they do not come."""
    records: list[Record] = []
    async with asyncio.timeout(WAIT_MAX_S):
        while len(records) < count:
            records += await poll(reader)
    assert len(records) == count
    return records


async def everything(ground: Ground, topic: str) -> list[list[Record]]:
    """Return all records of a topic, by partition."""
    async with consuming(ground) as reader:
        partitions = await assign_all(reader, topic)
        ends = await reader.end_offsets(partitions)
        records = await take(reader, sum(ends.values()))
    return [[record for record in records if record.partition == partition.partition] for partition in partitions]


async def eventually(holds: Callable[[], Awaitable[bool] | bool], description: str) -> None:
    """Let time pass until it holds. Raises `AssertionError` when it does not come to that."""
    deadline_s = asyncio.get_running_loop().time() + WAIT_MAX_S
    while True:
        result = holds()
        if result if isinstance(result, bool) else await result:
            return
        assert asyncio.get_running_loop().time() < deadline_s, f"never: {description}"
        await asyncio.sleep(0.05)


def offsets(records: Sequence[Record]) -> list[int]:
    return [record.offset for record in records]


def values(records: Sequence[Record]) -> list[bytes | None]:
    return [record.value for record in records]
