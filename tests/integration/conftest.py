"""Fixtures of integration tests: buses with the topics of one test, gateway, trainer and registry processes.

The registries have a replica that loads routed versions, and a gate that reads scores from a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.dead_letters import DeadLetterSender
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings, Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import LoadedVersion, ModelEvent, Probe, Replica, Routing, Turn
from headrace_schemas.values.base import utcnow
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


GATE = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
print(json.dumps({"gate": ["t"], "audit": ["a"]}), flush=True)
players = set()
for line in sys.stdin:
    asked = json.loads(line)
    if asked["version"] not in players:
        players.add(asked["version"])
        (folder / "runs").open("a").write(asked["version"] + "\\n")
    while (folder / "hold").exists():
        time.sleep(0.02)
    scores = json.loads((folder / "scores.json").read_text()).get(asked["version"], {})
    print(json.dumps(asked | {"score": scores.get("t", 0.5)}), flush=True)
"""
REPLICA_HEARTBEAT_S = 0.1


class RegistryRig:
    """Registry processes on one bus. `registry()` starts a process, `publish` sends a version, `settled` awaits a
    routing."""

    def __init__(self, address: str, folder: Path, database_url: str = "sqlite") -> None:
        self.folder = folder
        self.common = Common(data_dir=folder / "data", bus=BusSettings(address=address))
        self.blobs = BlobStore.open(self.common)
        # rewards of functions count from the scorer alone
        self.producer = EventProducer(self.common.bus, "headrace/scorer", self.blobs)
        refuse = DeadLetterSender("test", self.producer)
        self.routing = TopicTable(Routing, self.common.bus, "test-routing", self.blobs, refuse)
        self.decisions: list[ModelEvent] = []
        self._events = TopicTable(ModelEvent, self.common.bus, "test-events", self.blobs, refuse, self._decided)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.module = "headrace_registry"
        self.replica_url = "http://127.0.0.1:1"
        self.capacity = 1
        self._environ = {
            "HEADRACE_DATA_DIR": str(self.common.data_dir),
            "HEADRACE_BUS__ADDRESS": json.dumps(address),
            "HEADRACE_DATABASE__URL": json.dumps(database_url),
            "HEADRACE_REGISTRY__POLL_S": "0.2",
            "HEADRACE_REGISTRY__GATE__COMMAND": json.dumps([sys.executable, "-S", "-c", GATE, str(folder)]),
            "HEADRACE_REGISTRY__GATE__AUDIT_TASKS": "4",
        }

    def set(self, environ: dict[str, str]) -> None:
        """Set environment variables of the registries that start from now on."""
        self._environ |= environ

    def _decided(self, _key: str, event: ModelEvent | None) -> None:
        if event is not None and event.decision_id not in {decision.decision_id for decision in self.decisions}:
            self.decisions.append(event)

    def registry(self) -> tuple[subprocess.Popen[bytes], str]:
        """Start a registry process. Return the process and the URL of its REST interface."""
        port = free_port()
        environ = {**os.environ, **self._environ, "HEADRACE_REGISTRY__PORT": str(port)}
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "registry.log").open("ab")
        process = subprocess.Popen([sys.executable, "-m", self.module], env=environ, stdout=log, stderr=log)
        self._processes.append(process)
        return process, f"http://127.0.0.1:{port}"

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        await topics.ensure(self.common.bus)  # a version may be published before the first registry has started
        await self.producer.start()
        tasks = [asyncio.create_task(work) for work in (self.routing.run(), self._events.run(), self._replica())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.producer.stop()
            for process in self._processes:
                process.send_signal(signal.SIGTERM)
            for process in self._processes:
                process.wait(20)

    async def publish(
        self, model: str, step: int, scores: dict[str, float] | None = None, parent: str | None = None
    ) -> str:
        manifest, ref = tiny_model.version(self.blobs, model, f"{model} {step}", step=step, parent=parent)
        path = self.folder / "scores.json"
        contents = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(contents | ({manifest.version: scores} if scores else {})))
        await self.producer.send(tiny_model.checkpoint(manifest, ref, utcnow()))
        return manifest.version

    async def _replica(self) -> None:
        started = utcnow()
        while True:
            served = {version.version for routing in self.routing.rows.values() for version in routing.serve}
            probe = Probe(max_abs_delta=0.0, passed=True)
            await self.producer.send(
                Replica(
                    time=utcnow(),
                    replica_id="replica-1",
                    url=self.replica_url,
                    engine="fake",
                    versions=tuple(LoadedVersion(version=name, state="ready", probe=probe) for name in sorted(served)),
                    capacity=self.capacity,
                    ttl_s=10,
                    started_at=started,
                )
            )
            await asyncio.sleep(REPLICA_HEARTBEAT_S)

    async def until(self, condition: Callable[[], object], label: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                log = (self.folder / "registry.log").read_text()[-3000:]
                raise TimeoutError(f"{label}: not after {timeout_s} s\n{self.decisions}\n{log}")
            await asyncio.sleep(0.02)

    def champion(self, model: str) -> str | None:
        routing = self.routing.rows.get(model)
        return routing.champion if routing else None

    def runs(self) -> list[str]:
        """Return the versions that the gate has started to play, in order."""
        path = self.folder / "runs"
        return path.read_text().split() if path.exists() else []

    def decisions_about(self, version: str) -> list[str]:
        return [event.decision for event in self.decisions if event.version == version]
