"""Reads the `routing` table for a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from headrace_runtime.blobs import BlobStore
from headrace_runtime.consumer import TopicTable
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.settings import BusSettings
from headrace_runtime.wire import Record
from headrace_schemas import Routing


class RoutingFollower:
    """Hands the routing of all models to `follow` once all of it was read, and again after every change.

    What a table said before the process started is history: versions of old tables are never loaded.
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
        """Whether routing was read; it may be empty."""
        return self._table.loaded.is_set()

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._table.run())
            await self._table.loaded.wait()
            self._follow(self._newest.values())

    def _changed(self, model: str, routing: Routing | None) -> None:
        known = self._newest.get(model)
        if routing is None:
            self._newest.pop(model, None)
        elif known is None or routing.revision >= known.revision:  # a registry that was replaced may still write
            self._newest[model] = routing
        if self.ready:
            self._follow(self._newest.values())
