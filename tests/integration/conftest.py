"""Fixtures of integration tests: buses with the topics of one test, a gateway process, and trainer processes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_schemas import Turn
from tests.support import presence, tiny_model
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import routing
from tests.support.processes import free_port
from tests.support.servers import BrokerProcess, KafkaNode
from tests.support.service_process import BusView, GatewayProcess, LoggedProcess, bus_view, wait_healthy
from tests.support.wire_client import administering, eventually


async def wipe(bus: str) -> None:
    async with administering(bus) as admin:

        async def topics() -> list[str]:
            return [name for name in await admin.list_topics() if not name.startswith("__")]

        async def empty() -> bool:
            return not await topics()

        await admin.delete_topics(await topics())
        await eventually(empty)


@pytest.fixture(scope="package")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a Kafka bus. Each user must delete all topics after use."""
    presence.need("kafka")
    node = KafkaNode(tmp_path_factory.mktemp("own-kafka"), brief=True)
    node.start()
    yield node.address
    node.stop()


@pytest.fixture
def empty_bus(tmp_path: Path) -> Iterator[str]:
    """Yield the address of an embedded broker for this test alone."""
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker.address
    broker.stop()


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def own_bus(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Yield the address of an empty bus of each kind."""
    if request.param == "embedded":
        yield request.getfixturevalue("empty_bus")
        return
    address: str = request.getfixturevalue("own_kafka")
    yield address
    await wipe(address)


def on_each_bus(fixture: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test on each kind of bus. `make test` runs only the embedded broker."""
    return pytest.mark.parametrize(fixture, ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)


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


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("trainer-process") / "base", layers=1)


class TrainerProcess(LoggedProcess):
    """Trainer process. Call `begin`, then `kill` (SIGKILL) or `stop` (SIGTERM), and `begin` again on the same
    folder."""

    def __init__(self, folder: Path, bus: str, base: Path, **settings: object) -> None:
        super().__init__("trainer", "headrace_trainer", folder / "trainer.log", free_port())
        self.data_dir = folder / "data"
        own_settings = {"BASE": base, "PORT": self.port, "STEPS_PER_VERSION": 1, **settings}
        named = {f"TRAINER__{name}": value for name, value in own_settings.items()}
        self.set({"DATA_DIR": self.data_dir, "BUS__ADDRESS": bus, **named})


@pytest.fixture
def processes() -> Iterator[list[TrainerProcess]]:
    """Yield a list for trainer processes, which are all killed after the test."""
    started: list[TrainerProcess] = []
    yield started
    for process in started:
        if process.running():
            process.kill()
