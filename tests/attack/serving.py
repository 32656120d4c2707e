"""A gateway, a replica with a tiny model, and the bus between them: three processes as users have them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from headrace_operations.toml_text import toml
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Routing
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model
from tests.support.broker_process import BrokerProcess
from tests.support.gateway_process import GatewayProcess, bus_view, wait_healthy
from tests.support.ports import free_port
from tests.support.processes import wait_until
from tests.support.replica_process import ReplicaProcess

MODEL = "tiny"
_START_S = 300.0
"""Importing torch takes long where others compute."""


@dataclass(frozen=True)
class Serving:
    """Addresses that an attacker reaches, and the operator's view."""

    gateway: GatewayProcess
    replica: ReplicaProcess
    version: str
    bus: str
    broker_url: str

    def block_s(self, kind: str) -> dict[str, float]:
        """Return the longest block of each event loop, as its process reports it."""
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
    """Ready to answer. Each tenant's API key is its name and has the `scopes`. `build` writes the model."""
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
    """The longest block of the event loop of each process, by the URLs of their pages."""
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
