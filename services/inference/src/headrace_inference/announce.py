"""Reports this replica on the bus by heartbeats, and follows the topic `routing`, which names the versions to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from headrace_runtime.clock import Clock
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record, tombstone
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import LoadedVersion, Replica, Routing
from headrace_schemas.events.routing import LoadState

log = get_logger(__name__)
_VERSIONS_MAX = 64
"""Largest number of versions in a `Replica` event."""
_ORDER: tuple[LoadState, ...] = ("ready", "draining", "loading", "failed")
"""Order of the versions in a heartbeat, so that versions which take calls are never those that do not fit."""


class Announcer:
    """Publisher of the replica's heartbeats on the topic `replicas`. One task must call `run`.

    Setting the event `change` causes a heartbeat at once; several changes may share one heartbeat.
    """

    def __init__(
        self,
        producer: EventProducer,
        clock: Clock,
        identity: Replica,
        versions: Callable[[], tuple[LoadedVersion, ...]],
        in_flight: Callable[[], int],
        heartbeat_s: float,
        change: asyncio.Event,
        supports_forms: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create the publisher.

        Args:
            producer: producer on the bus.
            clock: clock for the timestamps and the interval.
            identity: the fields of the heartbeat that do not change.
            versions: function that returns the state of each version.
            in_flight: function that returns the number of unfinished choices.
            heartbeat_s: interval of the heartbeats in seconds.
            change: event that the caller sets after a change.
            supports_forms: function that returns whether all present versions support the answer forms in `identity`.
        """
        self._producer = producer
        self._clock = clock
        self._identity = identity
        self._versions = versions
        self._in_flight = in_flight
        self._heartbeat_s = heartbeat_s
        self._change = change
        self._supports_forms = supports_forms
        self._last: datetime = identity.time

    @property
    def replica_id(self) -> str:
        """Name of the replica on the bus."""
        return self._identity.replica_id

    async def run(self) -> None:
        """Publish heartbeats until cancelled. While the bus is unavailable, heartbeats are left out."""
        while True:
            self._change.clear()
            try:
                await self.announce()
            except Unavailable as error:
                log.warning("heartbeat_missed", error=str(error))
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._change.wait()
            except TimeoutError:
                continue

    async def announce(self, *, stopping: bool = False) -> None:
        """Publish one heartbeat with the present state of the versions.

        Args:
            stopping: whether the replica reports that it is about to stop, so that gateways send it no new requests.

        Raises:
            Unavailable: the bus cannot be reached.
        """
        self._last = max(self._clock.now(), self._last)
        beat = {
            "time": self._last,
            "versions": tuple(sorted(self._versions(), key=lambda local: _ORDER.index(local.state))[:_VERSIONS_MAX]),
            "in_flight": self._in_flight(),
            "grammars": self._identity.grammars if self._supports_forms() else (),
            "stopping": stopping,
        }
        await self._producer.send(self._identity.model_copy(update=beat))

    async def withdraw(self) -> None:
        """Delete this replica's record from the topic `replicas`. Raises `Unavailable` if the bus cannot be reached."""
        await self._producer.send_raw([tombstone(Replica.topic, self._identity.key)])


class RoutingFollower:
    """Reader of the topic `routing`, which calls `follow` once it has read the topic to its end, and after each change.

    Each call passes the newest routing tables of all models, so a version that only older records name is never loaded.
    """

    def __init__(
        self,
        bus: BusSettings,
        client_id: str,
        blobs: BlobStore,
        refuse: Callable[[Record, InvalidEvent], Awaitable[None]],
        follow: Callable[[Iterable[Routing]], None],
    ) -> None:
        self._newest: dict[str, Routing] = {}
        self._follow = follow
        self._table = TopicTable(Routing, bus, client_id, blobs, refuse, self._changed)

    @property
    def is_ready(self) -> bool:
        """Whether the topic was read to its end. It may be empty."""
        return self._table.loaded.is_set()

    async def run(self) -> None:
        """Follow the topic until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._table.run())
            await self._table.loaded.wait()
            self._follow(self._newest.values())

    def _changed(self, model: str, routing: Routing | None) -> None:
        newest = self._newest.get(model)
        if routing is None:
            self._newest.pop(model, None)
        elif newest is None or routing.revision >= newest.revision:  # a registry that was replaced may still write
            self._newest[model] = routing
        if self.is_ready:
            self._follow(self._newest.values())
