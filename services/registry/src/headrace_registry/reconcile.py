"""Makes the bus equal to the database: a routing that the bus lost or that a former leader overwrote is sent again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import routing, store
from headrace_registry.leader import LeaderLease
from headrace_runtime.clock import Clock
from headrace_runtime.isolation import each
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor
from headrace_schemas import Event, Routing

log = get_logger(__name__)


class Reconciler:
    """Call `tick` periodically. A difference that lasts longer than `patience_s` is repaired."""

    def __init__(
        self, processor: Processor, lease: LeaderLease, on_bus: Mapping[str, Routing], clock: Clock, patience_s: float
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._on_bus = on_bus
        self._clock = clock
        self._patience_s = patience_s
        self._differs_since: dict[str, float] = {}

    async def tick(self) -> None:
        """Publish overdue routings again, with a revision above that on the bus."""
        await self._processor.step(self._work)

    async def _work(self, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        await self._lease.check(tx)

        async def compare(model: str) -> list[Event]:
            record = await store.model(tx, model)
            wanted = routing.stored(record) if record else None
            shown = self._on_bus.get(model)
            if wanted is None or shown == wanted:
                self._differs_since.pop(model, None)
            elif self._overdue(model):
                seen = shown.revision if shown else -1
                log.warning("routing_published_again", model=model, revision=wanted.revision, on_bus=seen)
                return [*await routing.publish_again(tx, now, model, seen)]
            return []

        return await each(tx, "registry.reconcile", await store.model_names(tx), compare)

    def _overdue(self, model: str) -> bool:
        now_s = self._clock.monotonic_s()
        since = self._differs_since.setdefault(model, now_s)
        if now_s - since < self._patience_s:
            return False
        del self._differs_since[model]
        return True
