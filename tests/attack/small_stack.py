"""A broker and a few services of their own, a producer of raw records, and what is on a topic in the end."""

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
from headrace_runtime import topics
from headrace_runtime.blobs import BlobStore
from headrace_runtime.producer import EventProducer
from headrace_runtime.settings import BusSettings
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
        made = ServiceProcess(name, self.folder / name, self.bus, BLOBS__URL=self.blobs.url, **settings)
        self.services.append(made)
        return made

    async def send(self, event: Event) -> None:
        await self.producer.send(event)

    async def send_raw(
        self, topic: str, key: str, value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> Place:
        sent = await self.raw.send_and_wait(topic, value, key.encode(), headers=list(headers))
        return sent.topic, sent.partition, sent.offset

    async def events(self, kind: type[E]) -> list[E]:
        """Everything on the event's topic."""
        async with connected(self.bus) as open_topics:
            found = [entry.event async for entry in open_topics.read(Range(kind.topic))]
        return [event for event in found if isinstance(event, kind)]

    async def until(self, kind: type[E], enough: Callable[[list[E]], bool], timeout_s: float = 60.0) -> list[E]:
        """Everything on the event's topic once it is enough, or when waiting is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = await self.events(kind)
            if enough(found) or time.monotonic() > deadline:
                return found
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
    made = SmallStack(folder, broker.address, blobs, producer, raw, [])
    try:
        await topics.ensure(settings)
        await producer.start()
        await raw.start()
        yield made
    finally:
        await producer.stop()
        await raw.stop()
        for service in made.services:
            if service.running():
                service.stop()
        broker.stop()
