"""Makes the bus equal to the database: publishes a routing again that the bus lost or a former leader overwrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.versions import routing
from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import each
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event, Routing

log = get_logger(__name__)


class Reconciler:
    """Compares the routings on the bus with those in the database. Repairs a difference that lasts longer than
    `grace_s`."""

    def __init__(
        self, processor: Processor, lease: LeaderLease, on_bus: Mapping[str, Routing], clock: Clock, grace_s: float
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._on_bus = on_bus
        self._clock = clock
        self._grace_s = grace_s
        self._differs_since: dict[str, float] = {}

    async def tick(self) -> None:
        """Publish overdue routings again, with a revision above the one on the bus."""
        await self._processor.step(self._work)

    async def _work(self, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        await self._lease.check(tx)

        async def compare(model: str) -> list[Event]:
            record = await store.load_model(tx, model)
            stored = routing.last_published(record) if record else None
            published = self._on_bus.get(model)
            if stored is None or published == stored:
                self._differs_since.pop(model, None)
            elif self._is_overdue(model):
                published_revision = published.revision if published else -1
                log.warning("routing_published_again", model=model, revision=stored.revision, on_bus=published_revision)
                return [*await routing.publish_again(tx, now, model, published_revision)]
            return []

        return await each(tx, "registry.reconcile", await store.model_names(tx), compare)

    def _is_overdue(self, model: str) -> bool:
        now_s = self._clock.monotonic_s()
        since = self._differs_since.setdefault(model, now_s)
        if now_s - since < self._grace_s:
            return False
        del self._differs_since[model]
        return True
