"""A broker inside the test's own event loop, with every part real but the process; and its parts alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace_broker.app import running_broker
from headrace_broker.broker import Broker
from headrace_broker.group import Group
from headrace_broker.protocol.topics import ConfigEntry, CreateTopicsRequest, CreateTopicsResponse, NewTopic
from headrace_broker.server import Server
from headrace_broker.settings import BrokerSettings
from headrace_broker.store import Store
from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.disk import DiskGuard
from tests.support.wire_client import WireClient, connected
from tests.unit.broker.harness import Clients, Harness


class Live(NamedTuple):
    broker: Broker
    server: Server
    store: Store

    def client(self) -> AbstractAsyncContextManager[WireClient]:
        return connected(f"127.0.0.1:{self.broker.port}")

    async def create(self, name: str, partitions: int = 1, **config: object) -> str:
        """A topic. Underscores in settings stand for dots."""
        entries = tuple(ConfigEntry(key.replace("_", "."), str(value)) for key, value in config.items())
        async with self.client() as client:
            topics = (NewTopic(name, partitions, 1, (), entries),)
            response = await client.ask(CreateTopicsRequest(topics, 1_000, False), CreateTopicsResponse)
        assert [topic.error_code for topic in response.topics] == [0], response
        return name


Run = Callable[..., AbstractAsyncContextManager[Live]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`async with run(**settings) as live:` a broker on this test's file, unsynced; again for a restart."""

    @contextlib.asynccontextmanager
    async def start(
        guards: tuple[DiskGuard | None, DiskGuard | None] = (None, None), **changes: object
    ) -> AsyncIterator[Live]:
        settings = BrokerSettings.model_validate({"kafka_port": 0, "port": 0, "fsync": False, **changes})
        store = Store(tmp_path, fsync=settings.fsync, file_bytes_max=settings.file_bytes_max)
        try:
            async with running_broker(store, settings, SystemClock(), guards=guards) as (broker, server):
                yield Live(broker, server, store)
        finally:
            store.close()

    return start


@pytest.fixture
async def live(run: Run) -> AsyncIterator[Live]:
    """A broker with default settings."""
    async with run() as running:
        yield running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Harness]:
    """Writer and reader of the file, without a server."""
    harness = Harness(tmp_path)
    yield harness
    harness.close()


@pytest.fixture
def clients() -> Clients:
    """Member of a group in memory."""
    return Clients(Group("g"))
