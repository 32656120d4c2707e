"""The routing table of a model, which is published as a whole whenever it changes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import queries, rollout_store, store
from headrace_registry.storage.records import ModelRecord
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import MODELS
from headrace_schemas import Arm, Routing, ServedVersion, TrafficSplit
from headrace_schemas.events.routing import Alias

WITHDRAWN_MAX = 1024
"""Largest number of withdrawn versions that a routing names, the most recent ones. The event's schema has this
bound."""


async def publish(tx: AsyncConnection, now: datetime, name: str) -> Sequence[Routing]:
    """Return the model's routing with the next revision if it differs from the last published one."""
    record = await store.load_model(tx, name)
    assert record is not None
    routing = await _current_routing(tx, now, record)
    last = last_published(record)
    if last is not None and _comparable(last) == _comparable(routing):
        return ()
    return await _save(tx, routing)


async def publish_again(tx: AsyncConnection, now: datetime, name: str, revision_seen: int) -> Sequence[Routing]:
    """Return the last published routing again, with a revision above the one on the bus."""
    record = await store.load_model(tx, name)
    if record is None or record.routing is None:
        return ()
    last = Routing.from_stored(record.routing.encode())
    revision = max(last.revision, revision_seen) + 1
    return await _save(tx, last.model_copy(update={"time": now, "revision": revision}))


def last_published(record: ModelRecord) -> Routing | None:
    """Return the routing that was published last, or None."""
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
            for name, rollout in (await queries.routing_names(tx, record.model)).items()
            if rollout in served_names
        },
        withdrawn=tuple(await store.withdrawn_versions(tx, record.model, WITHDRAWN_MAX)),
        untrained=tuple(await queries.untrained_versions(tx, record.model, WITHDRAWN_MAX)),
        pinned=record.pinned,
        paused=record.paused,
        split=_split(under_way),
    )


def _split(under_way: Sequence[RolloutRecord]) -> TrafficSplit | None:
    """Return the traffic split among the candidates that get users, or None."""
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
    """Return the versions that replicas must load: those with a role, in a rollout or requested, each adapter after its
    base."""
    served: dict[str, ServedVersion] = {}
    requested = await queries.requested_versions(tx, record.model)
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
