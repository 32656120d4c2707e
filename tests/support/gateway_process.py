"""The gateway in a separate process on a real bus, and a view of that bus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TypeVar

from aiokafka import ConsumerRecord, TopicPartition

from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event, Turn
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values.errors import InvalidEvent
from tests.support.processes import free_port, wait_open
from tests.support.service_process import LoggedProcess

E = TypeVar("E", bound=Event)


class GatewayProcess(LoggedProcess):
    """Gateway process that can be killed (SIGKILL) and started again on the same folder and port."""

    def __init__(self, folder: Path, bus: str, environ: Mapping[str, str] | None = None, /, **settings: object) -> None:
        """Configure the process. For `environ` see `LoggedProcess.set`."""
        super().__init__("gateway", "headrace_gateway", folder / "gateway.log", free_port())
        self.folder = folder
        self.set({"DATA_DIR": folder, "BUS__ADDRESS": bus, "GATEWAY__PORT": self.port, **settings}, environ)

    def start(self, timeout_s: float = 90.0) -> None:
        """Start the process and wait until it listens: 3 s on an idle machine, much longer while pytest workers share
        the cores.
        """
        self.begin()
        try:
            wait_open(self.port, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the gateway says {self.log[-3000:]}") from None


class BusView:
    """Client of a bus that produces and reads events as any service would. Use `bus_view`."""

    def __init__(self, settings: BusSettings, producer: EventProducer, blobs: BlobStore) -> None:
        self.settings = settings
        self._blobs = blobs
        self.producer = producer

    async def read(self, kind: type[E]) -> list[E]:
        """Return every event on the topic in order per partition, with complete turns. Damaged records are skipped."""
        events: list[E] = []
        history = TurnHistory()
        for message in await read_topic(self.settings, kind.topic):
            with contextlib.suppress(InvalidEvent):
                event = (await decode(record_of(message), self._blobs)).event
                event = history.whole_turn(event) if isinstance(event, Turn) else event
                assert isinstance(event, kind)
                events.append(event)
        return events


async def read_topic(settings: BusSettings, topic: str) -> list[ConsumerRecord]:
    """Return every record on the topic in order per partition."""
    reader = consumer(settings, "test")
    await reader.start()
    try:
        partitions: list[TopicPartition] = await assign_all(reader, topic)
        await reader.seek_to_beginning(*partitions)
        ends = await reader.end_offsets(partitions)
        records: list[ConsumerRecord] = []
        while any([await reader.position(partition) < ends[partition] for partition in partitions]):
            for messages in (await reader.getmany(timeout_ms=200)).values():
                records += messages
        return records
    finally:
        await reader.stop()


@contextlib.asynccontextmanager
async def bus_view(address: str, folder: Path) -> AsyncIterator[BusView]:
    """Connect to a bus. `folder` is the gateway's absolute data folder, whose blob store holds large events."""
    settings = Overrides(None, {}, {}).bus_settings(address)
    await topics.ensure(settings)
    blobs = BlobStore(f"file://{folder}/blobs")
    producer = EventProducer(settings, "headrace/test", blobs)  # what services of ours would send
    await producer.start()
    try:
        yield BusView(settings, producer, blobs)
    finally:
        await producer.stop()


def wait_healthy(url: str, timeout_s: float = 90) -> None:
    """Wait until `/health` returns 200. Raises `TimeoutError`."""
    import httpx2

    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} is not healthy after {timeout_s} s")
        time.sleep(0.05)
