"""Grounds of the bus contract: a bus with the clients that the services use.

A scenario is written once. It gets topics, producers, consumers and hosts from a `Ground`, and states promises of every
bus. The grounds are the simulated bus with its virtual clock, and real buses at an address: the embedded broker and
Apache Kafka.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from tests.simulation import faust_app
from tests.simulation.bus import Bus
from tests.simulation.process import (
    Mishaps,
    Process,
    TaskGroup,
    Trace,
    VirtualLoop,
    alive,
    end_others,
    enter,
    leave,
    task_factory,
)
from tests.support import wire_client

if TYPE_CHECKING:
    from tests.simulation.bus import Server


WAIT_MAX_S = 60.0


class Ground(Protocol):
    """Bus under test. `draw` is the scenario's source of randomness, whose seed is printed."""

    bus: BusSettings
    folder: Path
    draw: random.Random

    async def create(self, partitions: int) -> str:
        """Create an empty topic, and return its name."""

    def spawn(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run a coroutine like a separate process, concurrently with the scenario."""


Scenario = Callable[[Ground], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def producing(ground: Ground) -> AsyncIterator[AIOKafkaProducer]:
    """Start the producer of `EventProducer`, with the same options."""
    producer = EventProducer(ground.bus, "used", BlobStore(f"memory://{ground.folder.name}"))
    await producer.start()
    try:
        yield producer._producer
    finally:
        await producer.stop()


@contextlib.asynccontextmanager
async def consuming(ground: Ground, **options: object) -> AsyncIterator[AIOKafkaConsumer]:
    """Start a consumer with our default options and no assignment."""
    reader = consumer(ground.bus, "used", **options)
    await reader.start()
    try:
        yield reader
    finally:
        await reader.stop()


async def send(producer: AIOKafkaProducer, topic: str, values: Iterable[bytes], partition: int = 0) -> None:
    """Send `values` in order to one partition, and wait for their acknowledgement."""
    await asyncio.gather(*[await producer.send(topic, value, b"k", partition, headers=[]) for value in values])


async def poll(reader: AIOKafkaConsumer, *partitions: TopicPartition, records_max: int | None = None) -> list[Record]:
    batches = await reader.getmany(*partitions, timeout_ms=100, max_records=records_max)
    return [record_of(message) for messages in batches.values() for message in messages]


async def take(reader: AIOKafkaConsumer, count: int) -> list[Record]:
    """Return the next `count` records in the order of arrival. Fail if there are more, or too few in time."""
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
    """Wait until `holds` returns True. Raises `AssertionError` if it does not in time."""
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


class RealGround:
    """Ground with a real bus at an address. Processes are tasks."""

    def __init__(self, address: str, folder: Path, seed: int) -> None:
        self.bus = Overrides(None, {}, {}).bus_settings(address).model_copy(update={"session_timeout_s": 6.0})
        self.folder = folder
        self.draw = random.Random(seed)

    async def create(self, partitions: int) -> str:
        name = f"used-{uuid.uuid4().hex[:12]}"
        async with wire_client.administering(self.bus.address) as admin:
            await wire_client.create(admin, name, partitions)
        return name

    def spawn(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(main())


class SimulatedGround:
    """Ground with a simulated bus. No fault is ordered, but each permitted behaviour may occur at random."""

    request_timeout_s = 3.0

    def __init__(self, folder: Path, seed: int) -> None:
        """Create a simulated bus. `bus` is only the services' setting, since simulated clients find the bus in their
        world."""
        self.folder = folder
        self.draw = random.Random(seed)
        self.bus = BusSettings(address="simulated:9092", request_timeout_s=self.request_timeout_s)
        self.world = _World(seed, self.request_timeout_s)
        self._made = 0

    async def create(self, partitions: int) -> str:
        self._made += 1
        name = f"used-{self._made}"
        self.world.bus.create(name, partitions)
        return name

    def spawn(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        self._made += 1
        return Process(f"process-{self._made}", "used", 0).spawn(main())


class _World:
    def __init__(self, seed: int, request_timeout_s: float) -> None:
        self.bus = Bus(random.Random(f"bus {seed}"), Trace())
        self.injected: Counter[str] = Counter()
        self.mishaps = Mishaps(self.count)
        self.databases: dict[str, Server] = {}
        self.request_timeout_s = request_timeout_s
        self.skews_s: dict[str, float] = {}

    def count(self, fault: str) -> None:
        self.injected[fault] += 1


def play_for_real(scenario: Scenario, address: str, folder: Path, seed: int) -> None:
    """Run the scenario on a real bus. Raises its exception."""
    asyncio.run(scenario(RealGround(address, folder, seed)))


def play_simulated(scenario: Scenario, seed: int) -> None:
    """Run the scenario in the simulated world, in which no real time passes. Raises its exception."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder, _installed():
        ground = SimulatedGround(Path(folder), seed)
        loop = VirtualLoop(lambda: ground.world.bus.draw.random() * 1e-3, alive)
        loop.set_task_factory(task_factory)
        asyncio.set_event_loop(loop)
        enter(ground.world)
        try:
            loop.run_until_complete(_play(scenario, ground))
        finally:
            leave()
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Replace Kafka's clients by those of the simulation inside the context, and no other name."""
    with contextlib.ExitStack() as stack:
        for name, substitute in {**faust_app.STANDS_FOR, "asyncio.TaskGroup": TaskGroup}.items():
            stack.enter_context(mock.patch(name, substitute))
        yield


async def _play(scenario: Scenario, ground: SimulatedGround) -> None:
    try:
        await Process("scenario", "used", 0).spawn(scenario(ground))
    finally:
        with contextlib.suppress(AssertionError):  # what went wrong before matters more
            await end_others()
