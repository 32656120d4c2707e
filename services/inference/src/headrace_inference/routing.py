"""Reader of the topic `routing` for a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Routing


class RoutingFollower:
    """Calls `follow` with the routing of all models, once after the topic was read to its end and after every change.

    So versions that only older records of the topic name are never loaded.
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
    def ready(self) -> bool:
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
        if self.ready:
            self._follow(self._newest.values())
