"""Routing of a model, which is computed from the database and published completely whenever it changes.

If the bus has lost a routing, or a former leader has overwritten it, `Reconciler` publishes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import rollout_store, store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.records import ModelRecord
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import MODELS
from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import each
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Arm, Event, Routing, ServedVersion, TrafficSplit
from headrace_schemas.events.routing import Alias

WITHDRAWN_MAX = 1024
"""Maximum number of withdrawn versions in a routing, the most recent ones. The event's schema has this
bound."""


async def publish(tx: AsyncConnection, now: datetime, name: str) -> Sequence[Routing]:
    """Compute the model's routing. If it differs from the one that was published last, store it with the next revision,
    and return it as the event to publish."""
    record = await store.load_model(tx, name)
    assert record is not None
    routing = await _current_routing(tx, now, record)
    last = last_published(record)
    if last is not None and _comparable(last) == _comparable(routing):
        return ()
    return await _save(tx, routing)


async def publish_again(tx: AsyncConnection, now: datetime, name: str, revision_seen: int) -> Sequence[Routing]:
    """Store and return the routing that was published last, with a revision above `revision_seen`, the revision on the
    bus."""
    record = await store.load_model(tx, name)
    if record is None or record.routing is None:
        return ()
    last = Routing.from_stored(record.routing.encode())
    revision = max(last.revision, revision_seen) + 1
    return await _save(tx, last.model_copy(update={"time": now, "revision": revision}))


def last_published(record: ModelRecord) -> Routing | None:
    """Return the routing of a model that was published last, or None."""
    return Routing.from_stored(record.routing.encode()) if record.routing else None


async def _current_routing(tx: AsyncConnection, now: datetime, record: ModelRecord) -> Routing:
    aliases: dict[Alias, str] = {}
    if record.champion:
        aliases["champion"] = record.champion
    if record.previous:
        aliases["previous"] = record.previous
    under_way = await rollout_store.rollouts_under_way(tx, record.model)
    if under_way:
        aliases["canary"] = under_way[0].version
    served = await _serve(tx, record, [rollout.version for rollout in under_way])
    served_names = {rollout.version for rollout in served}
    return Routing(
        time=now,
        model=record.model,
        revision=record.revision + 1,
        aliases=aliases,
        serve=served,
        names={
            name: rollout
            for name, rollout in (await store.routing_names(tx, record.model)).items()
            if rollout in served_names
        },
        withdrawn=tuple(await store.withdrawn_versions(tx, record.model, WITHDRAWN_MAX)),
        untrained=tuple(await store.untrained_versions(tx, record.model, WITHDRAWN_MAX)),
        pinned=record.pinned,
        paused=record.paused,
        split=_split(under_way),
    )


def _split(under_way: Sequence[RolloutRecord]) -> TrafficSplit | None:
    """Return the traffic split among the candidates that serve users, or None if there are none."""
    canaries = [rollout for rollout in under_way if rollout.phase == "canary"]
    if not canaries:
        return None
    first = canaries[0]
    arms = [
        Arm(rollout_id=rollout.rollout_id, version=rollout.version, slot=rollout.slot, share=str(rollout.share))
        for rollout in canaries
    ]
    return TrafficSplit(unit=first.plan.unit, salt=first.salt, slots=first.slots, arms=tuple(arms))


async def _serve(tx: AsyncConnection, record: ModelRecord, under_way: Sequence[str]) -> tuple[ServedVersion, ...]:
    """Return the versions that replicas must load: those with a role, in a rollout, or requested by an operator.

    The base of an adapter precedes it.
    """
    served: dict[str, ServedVersion] = {}
    requested = await store.requested_versions(tx, record.model)
    for name in (record.champion, record.previous, *under_way, record.candidate, record.anchor, *requested):
        version = await store.load_version(tx, name) if name else None
        base = await store.load_version(tx, version.base) if version and version.base else None
        for version_record in (base, version):
            if version_record is not None:
                served[version_record.version] = ServedVersion(
                    version=version_record.version, manifest=version_record.manifest
                )
    return tuple(served.values())


async def _save(tx: AsyncConnection, routing: Routing) -> Sequence[Routing]:
    values = {"revision": routing.revision, "routing": routing.to_json().decode()}
    await tx.execute(update(MODELS).where(MODELS.c.model == routing.model).values(values))
    return (routing,)


def _comparable(routing: Routing) -> object:
    locks = routing.pinned, routing.paused
    return routing.aliases, routing.names, routing.serve, routing.withdrawn, routing.untrained, routing.split, locks


log = get_logger(__name__)


GRACE_S = 5.0
"""Seconds for which the routing on the bus may differ from the database before it is published again."""


class Reconciler:
    """Compares the routings on the bus with those in the database.

    If the routing of a model differs for longer than `grace_s`, it is published again.
    """

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        on_bus: Mapping[str, Routing],
        clock: Clock,
        grace_s: float = GRACE_S,
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._on_bus = on_bus
        self._clock = clock
        self._grace_s = grace_s
        self._differs_since: dict[str, float] = {}

    async def tick(self) -> None:
        """Publish the routings again that have differed for too long, with a revision above the one on the bus."""
        await self._processor.step(self._work)

    async def _work(self, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        await self._lease.check(tx)

        async def compare(model: str) -> list[Event]:
            record = await store.load_model(tx, model)
            stored = last_published(record) if record else None
            published = self._on_bus.get(model)
            if stored is None or published == stored:
                self._differs_since.pop(model, None)
            elif self._is_overdue(model):
                published_revision = published.revision if published else -1
                log.warning("routing_published_again", model=model, revision=stored.revision, on_bus=published_revision)
                return [*await publish_again(tx, now, model, published_revision)]
            return []

        return await each(tx, "registry.reconcile", await store.model_names(tx), compare)

    def _is_overdue(self, model: str) -> bool:
        now_s = self._clock.monotonic_s()
        since = self._differs_since.setdefault(model, now_s)
        if now_s - since < self._grace_s:
            return False
        del self._differs_since[model]
        return True
