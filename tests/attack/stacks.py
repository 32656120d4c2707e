"""Small stacks to attack.

`SmallStack` has a broker, a few services, a producer of raw records and the final content of topics. `headrace up` runs
with two tenants, a reward function with hostile results, and optional planted faults. `serving` runs a gateway, a
replica with a tiny model and the bus between them as three processes, as users do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from aiokafka import AIOKafkaProducer

from headrace.topics import Range, connected
from headrace_operations.supervisor.overrides import toml
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event, Routing
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model
from tests.support.fake_llm import FakeLLM
from tests.support.processes import free_port, wait_until
from tests.support.servers import BrokerProcess
from tests.support.service_process import (
    GatewayProcess,
    HeadraceUp,
    ReplicaProcess,
    ServiceProcess,
    bus_view,
    wait_healthy,
)

E = TypeVar("E", bound=Event)
Place = tuple[str, int, int]


@dataclass
class SmallStack:
    """A broker and the `services` that the attack starts; all are stopped with the stack."""

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
        """Return all events of type `kind` on their topic."""
        async with connected(self.bus) as open_topics:
            events = [entry.event async for entry in open_topics.read(Range(kind.topic))]
        return [event for event in events if isinstance(event, kind)]

    async def until(self, kind: type[E], enough: Callable[[list[E]], bool], timeout_s: float = 60.0) -> list[E]:
        """Return the events of type `kind` once `enough` accepts them, or after `timeout_s`."""
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


MODEL = "tiny"
_PLANTED_FOLDER = Path(__file__).parent / "planted"

REWARDS = '''
"""A reward function whose results are as strange as the context that callers send."""
RESULTS = [
    {"a": 1.7e308, "b": 1.7e308}, float("nan"), float("inf"), 1.7e308, -1.7e308, 10**400, "text", None, [], {"a": None},
    {f"criterion-{number}": 1.0 for number in range(65)}, {"\\x00": 1.0}, {"\\ud83d": 0.5}, 1e-320, True, object(), 0.5,
]

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

def strange(trajectory, context):
    choice = hash(trajectory.trajectory_id) % (len(RESULTS) + 5)
    if choice == len(RESULTS):
        raise ValueError("a\\x00b \\ud83d")
    if choice == len(RESULTS) + 1:
        raise Unprintable
    if choice == len(RESULTS) + 2:
        raise RecursionError("x" * 100_000)
    if choice == len(RESULTS) + 3:
        return context.get("k")
    if choice == len(RESULTS) + 4:
        raise SystemExit(3)
    return RESULTS[choice]
'''


def hostile_stack(folder: Path, judge: FakeLLM, settings: dict[str, object], *, planted: bool) -> HeadraceUp:
    folder.mkdir(parents=True)
    (folder / "strange_rewards.py").write_text(REWARDS, encoding="utf-8")
    base = tiny_model.build(folder / "base")
    keys = [
        {"name": name, "tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "scopes": scopes}
        for name, scopes in (("mallory", ["chat", "feedback", "admin"]), ("alice", ["chat", "feedback"]))
    ]
    limits = {"requests_per_s": 5000.0, "burst": 10_000}
    config = folder / "headrace.toml"
    config.write_text("", encoding="utf-8")
    chosen: dict[str, object] = {
        "gateway.keys": keys,
        **{
            f"gateway.{limit_name}.{name}": value
            for limit_name in ("limits_per_key", "limits_total")
            for name, value in limits.items()
        },
        "trainer.base": str(base),
        "trainer.model": MODEL,
        "trainer.batch_experiences": 64,
        "trainer.batch_experiences_min": 1,
        "collector.idle_s": 20.0,
        "scorer.functions": ["strange_rewards:strange"],
        "scorer.labels": {"good": 1.0},
        "scorer.reward_wait_s": 5.0,
        "judge.endpoint.base_url": judge.base_url,
        "judge.endpoint.model": "judge-1",
        **settings,
    }
    folders = [str(folder), *([str(_PLANTED_FOLDER)] if planted else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"PYTHONPATH": os.pathsep.join(folders)}
    return HeadraceUp(folder / "data", config, chosen, environ)


_START_S = 300.0
"""Maximum seconds for the start: importing torch takes long on a busy machine."""


@dataclass(frozen=True)
class Serving:
    """Addresses of a running gateway that an attacker reaches, and the operator's metrics of its processes."""

    gateway: GatewayProcess
    replica: ReplicaProcess
    version: str
    bus: str
    broker_url: str

    def block_s(self, kind: str) -> dict[str, float]:
        """Return the longest block of each event loop in seconds, as its process reports it."""
        return block_s({"gateway": self.gateway.url, "replica": self.replica.url}, kind)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    tenants: tuple[str, ...] = (),
    *,
    scopes: tuple[str, ...] = ("chat", "feedback"),
    build: Callable[[Path], Path] = tiny_model.build,
    **settings: object,
) -> AsyncIterator[Serving]:
    """Run a gateway, a replica and a bus during the block, and yield them once they answer.

    Args:
        folder: folder of all files.
        tenants: tenants with an API key, whose key is the tenant's name.
        scopes: scopes of these keys.
        build: writes the model's files to a folder.
        settings: additional settings.
    """
    data = folder / "data"
    broker_port = free_port()
    broker = BrokerProcess(folder / "broker", BROKER__PORT=broker_port)
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name, "scopes": scopes}
        for name in tenants
    ]
    key_settings = {"GATEWAY__KEYS": toml(keys)} if keys else {}
    await asyncio.to_thread(broker.start)
    gateway = GatewayProcess(data, broker.address, **key_settings)
    replica = ReplicaProcess(data, broker.address, **settings)
    try:
        async with bus_view(broker.address, data) as view:
            with ThreadPoolExecutor(2) as pool:
                starting = [pool.submit(replica.start, _START_S), pool.submit(gateway.start, _START_S)]
                champion = tiny_model.publish(BlobStore(f"file://{data}/blobs"), build(folder / "tiny"))
                for started in starting:
                    started.result()
            routing = {"model": MODEL, "revision": 0, "aliases": {"champion": champion.version}, "serve": [champion]}
            await view.producer.send(Routing.model_validate({"time": utcnow(), **routing}))
            await asyncio.to_thread(wait_until, lambda: _loaded(replica), _START_S, "the champion is loaded")
            await asyncio.to_thread(wait_healthy, gateway.url, _START_S)
            yield Serving(gateway, replica, champion.version, broker.address, f"http://127.0.0.1:{broker_port}")
    finally:
        for process in (gateway, replica, broker):
            await asyncio.to_thread(process.stop)


def block_s(urls: Mapping[str, str], kind: str) -> dict[str, float]:
    """Return the longest block of the event loop of each process, in seconds, read from the metrics pages at `urls`."""
    return {name: _gauge(httpx.get(f"{url}/metrics", timeout=60).text, kind) for name, url in urls.items()}


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` concurrently with the block, and cancel it at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _loaded(replica: ReplicaProcess) -> bool:
    return bool(httpx.get(f"{replica.url}/v1/models").json()["data"])


def _gauge(metrics: str, kind: str) -> float:
    name = f'headrace_event_loop_block_seconds{{kind="{kind}"}} '
    return next(float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name))
