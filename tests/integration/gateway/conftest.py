"""Fixtures for a gateway process on a real bus, with a fake replica that sends heartbeats to the bus."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_schemas import Turn
from tests.support.buses import BrokerProcess
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import routing
from tests.support.gateway_process import BusView, GatewayProcess, bus_view, wait_healthy

HEARTBEAT_S = 0.5


@dataclass
class Circle:
    """Gateway, fake replicas and bus around a model whose name is unique to the test, so that tests can share a bus."""

    model: str
    gateway: GatewayProcess
    replicas: list[FakeReplica]
    bus: BusView

    @property
    def base_url(self) -> str:
        return f"{self.gateway.url}/v1"

    async def turns(self) -> list[Turn]:
        return [turn for turn in await self.bus.read(Turn) if turn.model == self.model]


@contextlib.asynccontextmanager
async def circle(folder: Path, bus: str, *replicas: FakeReplica, **settings: object) -> AsyncIterator[Circle]:
    """Start a gateway, route the model to `replicas`, and wait until the gateway is healthy.

    `replicas` that already have a URL run elsewhere.
    """
    model = f"tiny-{uuid.uuid4().hex[:8]}"
    version = f"{model}@0123456789abcdef"
    data = folder / "data"
    gateway = GatewayProcess(data, bus, **{"GATEWAY__ANY_MODEL_NAME": "never", **settings})
    async with contextlib.AsyncExitStack() as stack:
        view = await stack.enter_async_context(bus_view(bus, data))
        for replica in replicas:
            replica.versions = (version,)
            replica.replica_id = f"{model}-{replica.replica_id}"
            if not replica.url:
                await stack.enter_async_context(replica.running())
        await view.producer.send(routing(version))
        beating = asyncio.create_task(_beat(view, replicas))
        await asyncio.to_thread(gateway.start)
        try:
            await asyncio.to_thread(wait_healthy, gateway.url)
            yield Circle(model, gateway, list(replicas), view)
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            await asyncio.to_thread(gateway.stop)


async def _beat(view: BusView, replicas: tuple[FakeReplica, ...]) -> None:
    while True:
        for replica in replicas:
            await view.producer.send(replica.heartbeat())
        await asyncio.sleep(HEARTBEAT_S)


@pytest.fixture
def mortal_bus(tmp_path: Path) -> Iterator[BrokerProcess]:
    """Yield a broker process for this test alone, which the test may kill."""
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
async def served(tmp_path: Path, embedded_bus: str) -> AsyncIterator[Circle]:
    """Yield a gateway with one replica on the embedded broker."""
    async with circle(tmp_path, embedded_bus, FakeReplica()) as running_circle:
        yield running_circle


@pytest.fixture
async def served_anywhere(tmp_path: Path, bus: str) -> AsyncIterator[Circle]:
    """Yield a gateway with one replica on each supported bus."""
    async with circle(tmp_path, bus, FakeReplica()) as running_circle:
        yield running_circle
