"""A broker, a few services, a producer of raw records, and the final content of topics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aiokafka import AIOKafkaProducer

from headrace.topics import Range, connected
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event
from tests.support.broker_process import BrokerProcess
from tests.support.service_process import ServiceProcess

E = TypeVar("E", bound=Event)
Place = tuple[str, int, int]


@dataclass
class SmallStack:
    """`services` are started by the attack; they are stopped with the stack."""

    folder: Path
    bus: str
    blobs: BlobStore
    producer: EventProducer
    raw: AIOKafkaProducer
    services: list[ServiceProcess]

    def service(self, name: str, **settings: object) -> ServiceProcess:
        process = ServiceProcess(name, self.folder / name, self.bus, BLOBS__URL=self.blobs.url, **settings)
        self.services.append(process)
        return process

    async def send(self, event: Event) -> None:
        await self.producer.send(event)

    async def send_raw(
        self, topic: str, key: str, value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> Place:
        sent = await self.raw.send_and_wait(topic, value, key.encode(), headers=list(headers))
        return sent.topic, sent.partition, sent.offset

    async def events(self, kind: type[E]) -> list[E]:
        """Return all events on the event's topic."""
        async with connected(self.bus) as open_topics:
            events = [entry.event async for entry in open_topics.read(Range(kind.topic))]
        return [event for event in events if isinstance(event, kind)]

    async def until(self, kind: type[E], enough: Callable[[list[E]], bool], timeout_s: float = 60.0) -> list[E]:
        """Return the events on the event's topic once there are enough, or after the wait."""
        deadline = time.monotonic() + timeout_s
        while True:
            events = await self.events(kind)
            if enough(events) or time.monotonic() > deadline:
                return events
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def small_stack(folder: Path) -> AsyncIterator[SmallStack]:
    broker = BrokerProcess(folder / "broker")
    broker.start()
    settings = BusSettings(address=broker.address)
    blobs = BlobStore((folder / "blobs").as_uri())
    blobs.put(b"so that the store is not empty")
    producer = EventProducer(settings, "headrace/attack", blobs)
    raw = AIOKafkaProducer(bootstrap_servers=broker.address, acks="all")
    stack = SmallStack(folder, broker.address, blobs, producer, raw, [])
    try:
        await topics.ensure(settings)
        await producer.start()
        await raw.start()
        yield stack
    finally:
        await producer.stop()
        await raw.stop()
        for service in stack.services:
            if service.running():
                service.stop()
        broker.stop()
