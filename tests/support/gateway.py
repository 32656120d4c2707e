"""A gateway in the test's own event loop, with real HTTP, spool and relay, and a list in place of the bus.

Also the request contexts in which tests parse the body of one call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx2
import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from headrace_gateway.access.keys import KeyRing, read_keys, share_of_tenant
from headrace_gateway.access.limits import RequestLimits
from headrace_gateway.apis.admission import Admission
from headrace_gateway.capture.captured_turns import CapturedTurns
from headrace_gateway.capture.publisher import Publisher
from headrace_gateway.capture.spool import Spool
from headrace_gateway.http import Parts, application
from headrace_gateway.requests.request_context import RequestContext
from headrace_gateway.requests.response_store import ResponseStore
from headrace_gateway.routing.engine import Engines
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_gateway.routing.replica_set import ReplicaSet, ReplicaWatch
from headrace_gateway.settings import CaptureSettings, GatewaySettings, RequestRules, UpstreamSettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Unavailable
from headrace_runtime.http.connections import ConnectionLimits
from headrace_runtime.http.protocol import TimedProtocol
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.settings.source_values import SourceValues
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event, Feedback, Routing, ServedVersion, Turn
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import BlobRef
from tests.support.fake_replica import VERSION, FakeReplica

E = TypeVar("E", bound=Event)
PARTITIONS = 4


@dataclass
class ListBus:
    """Bus in memory: the received records in order. While `back` is clear, sends wait, as during an outage."""

    records: list[Outgoing] = field(default_factory=list)
    back: asyncio.Event = field(default_factory=asyncio.Event)
    kept_waiting: int = 0
    """Number of sends that waited for the end of an outage."""

    def __post_init__(self) -> None:
        self.back.set()

    def events(self, kind: type[E]) -> list[E]:
        records = [record for record in self.records if record.topic == kind.topic]
        return [kind.from_json(record.value or b"") for record in records]


class ListProducer(EventProducer):
    """An `EventProducer` whose connection is a `ListBus`."""

    def __init__(self, bus: ListBus, blobs: BlobStore) -> None:
        super().__init__(BusSettings(), "headrace/gateway", blobs)
        self._bus = bus

    async def start(self) -> None:
        if not self._bus.back.is_set():
            raise Unavailable("the bus is away")

    async def stop(self) -> None:
        pass

    async def abandon(self) -> None:
        pass

    async def send_raw(self, records: Iterable[Outgoing]) -> None:
        self._bus.kept_waiting += not self._bus.back.is_set()
        await self._bus.back.wait()
        self._bus.records += records

    async def partitions(self, topic: str) -> set[int]:
        return set(range(PARTITIONS))


@dataclass
class Gateway:
    """A serving gateway with its replaceable parts."""

    url: str
    bus: ListBus
    spool: Spool
    publisher: Publisher
    catalog: ModelCatalog
    replica_set: ReplicaSet
    client: httpx2.AsyncClient

    def route(self, champion: str | None = VERSION, **changes: Any) -> None:
        self.catalog.update("tiny", routing(champion, **changes))

    def beat(self, *replicas: FakeReplica) -> None:
        for replica in replicas:
            self.replica_set.update(replica.replica_id, replica.heartbeat())

    async def chat(
        self, text: str = "hello", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx2.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    @property
    def turns(self) -> list[Turn]:
        """Return the captured turns with their complete prompts."""
        history = TurnHistory()
        return [history.whole_turn(turn) for turn in self.stored_turns]

    @property
    def stored_turns(self) -> list[Turn]:
        """Return the captured turns as they are stored on the topic, where a prompt may refer to an earlier turn."""
        return self.bus.events(Turn)


def routing(champion: str | None, serve: tuple[str, ...] = (), revision: int = 1, **changes: Any) -> Routing:
    blob = BlobRef(uri="memory://manifest", sha256="0" * 64, size=1)
    versions = dict.fromkeys([*([champion] if champion else ()), *serve])
    return Routing(
        time=datetime.now(UTC),
        model=next(iter(versions), VERSION).partition("@")[0],
        revision=revision,
        aliases={"champion": champion} if champion else {},
        serve=tuple(ServedVersion(version=version, manifest=blob) for version in versions),
    ).model_copy(update=changes)


@contextlib.asynccontextmanager
async def gateway(
    folder: Path,
    *replicas: FakeReplica,
    values: SourceValues | None = None,
    learns: LearnedSignals | None = None,
    captured: CapturedTurns | None = None,
    responses: ResponseStore | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """Run a gateway during the block. The version of the first replica is champion; each replica has sent one
    heartbeat.
    """
    defaults: dict[str, Any] = {
        "port": 0,
        "capture": CaptureSettings(bus_wait_s=0.2),
        "upstream": UpstreamSettings(hold_s=5, routing_wait_s=0.2, stall_timeout_s=0.3),
    }
    gateway_settings = GatewaySettings(**{**defaults, **settings})
    blobs = BlobStore((folder / "blobs").as_uri())
    clock = SystemClock()
    bus = ListBus()
    async with (
        Spool(
            folder / "spool", gateway_settings.capture.spool_bytes_max, gateway_settings.capture.spool_reserve_bytes
        ) as spool,
        Engines(gateway_settings.upstream) as engines,
    ):
        publisher = Publisher(lambda: ListProducer(bus, blobs), spool, gateway_settings.capture, send_timeout_s=1)
        draining = asyncio.create_task(publisher.run())
        replica_set = ReplicaSet(clock, lambda: True)
        catalog = ModelCatalog(
            gateway_settings.model_aliases,
            lambda: True,
            replica_set.changed,
            any_name=gateway_settings.any_model_name == "always",
        )
        watching = asyncio.create_task(ReplicaWatch(replica_set, engines, gateway_settings.upstream, clock).run())
        admission = Admission(
            KeyRing(read_keys(gateway_settings), gateway_settings.limits_per_key),
            RequestLimits(
                gateway_settings.limits_total,
                clock,
                tenant_share=share_of_tenant(gateway_settings, gateway_settings.keys),
                bytes_per_hour=gateway_settings.capture.tenant_bytes_per_hour,
            ),
            publisher,
        )
        app = application(
            Parts(
                gateway_settings,
                admission,
                catalog,
                replica_set,
                engines,
                clock,
                signals_of=lambda *_: learns,
                values=values or SourceValues(),
                captured=captured,
                responses=responses,
            )
        )
        try:
            async with (
                _listening(app) as port,
                httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client,
            ):
                running = Gateway(str(client.base_url).rstrip("/"), bus, spool, publisher, catalog, replica_set, client)
                if replicas:
                    running.route(replicas[0].versions[0])
                running.beat(*replicas)
                await until(lambda: publisher.connected)  # a turn before that would be spooled on a busy machine
                yield running
        finally:
            for task in (draining, watching):
                task.cancel()
            await asyncio.wait([draining, watching])


@contextlib.asynccontextmanager
async def _listening(app: ASGIApp) -> AsyncIterator[int]:
    """Serve `app` with uvicorn's protocol but without its server's timer, which would cost each test 0.2 s."""
    limits = ConnectionLimits()
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: TimedProtocol(limits, config, state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=5)


async def until(condition: Any, timeout_s: float = 5) -> None:
    """Wait until `condition()` is true. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (conditions of many kinds, none with an event)
            await asyncio.sleep(0.005)


_BYTES_MAX = 8_388_608


def lenient(
    choices_max: int = 4, json_values_max: int = 10_000, *, media: Literal["refuse", "placeholder"] = "refuse"
) -> RequestContext:
    """Return a context that accepts fields without an effect, such as hints."""
    return RequestContext(RequestRules(choices_max, json_values_max, media=media), _BYTES_MAX)


def strict(choices_max: int = 4, json_values_max: int = 10_000) -> RequestContext:
    """Return a context that refuses every field without an effect."""
    return RequestContext(RequestRules(choices_max, json_values_max, strict=True), _BYTES_MAX)


KEY = ids.session_key("default", "run")


def feedback(number: int) -> Feedback:
    return Feedback(time=utcnow(), feedback_id=str(number), session_key=KEY, value=float(number))


def numbers(bus: ListBus) -> list[int]:
    return [int(event.feedback_id) for event in bus.events(Feedback)]


@contextlib.asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
