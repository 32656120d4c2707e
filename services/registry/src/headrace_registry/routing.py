"""The routing table of a model, published whole whenever it changes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import store
from headrace_registry.catalog import queries
from headrace_registry.records import ModelRecord
from headrace_registry.rollouts import kept
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.tables import MODELS
from headrace_schemas import Arm, Routing, ServedVersion, TrafficSplit
from headrace_schemas.events.routing import Alias

WITHDRAWN_MAX = 1024
"""How many withdrawn versions a routing names, the last ones; what the event's schema takes."""


async def publish(tx: AsyncConnection, now: datetime, name: str) -> Sequence[Routing]:
    """The model's routing when it differs from the last published one, with the next revision; else nothing."""
    record = await store.model(tx, name)
    assert record is not None
    wanted = await _wanted(tx, now, record)
    last = stored(record)
    if last is not None and _content(last) == _content(wanted):
        return ()
    return await _save(tx, wanted)


async def publish_again(tx: AsyncConnection, now: datetime, name: str, revision_seen: int) -> Sequence[Routing]:
    """The routing once more, above whatever revision the bus has."""
    record = await store.model(tx, name)
    if record is None or record.routing is None:
        return ()
    last = Routing.from_stored(record.routing.encode())
    revision = max(last.revision, revision_seen) + 1
    return await _save(tx, last.model_copy(update={"time": now, "revision": revision}))


def stored(record: ModelRecord) -> Routing | None:
    """What was last published."""
    return Routing.from_stored(record.routing.encode()) if record.routing else None


async def _wanted(tx: AsyncConnection, now: datetime, record: ModelRecord) -> Routing:
    aliases: dict[Alias, str] = {}
    if record.champion:
        aliases["champion"] = record.champion
    if record.previous:
        aliases["previous"] = record.previous
    under_way = await kept.under_way(tx, record.model)
    if under_way:
        aliases["canary"] = under_way[0].version
    serve = await _serve(tx, record, [one.version for one in under_way])
    ready = {one.version for one in serve}
    return Routing(
        time=now,
        model=record.model,
        revision=record.revision + 1,
        aliases=aliases,
        serve=serve,
        names={name: one for name, one in (await queries.names(tx, record.model)).items() if one in ready},
        withdrawn=tuple(await store.withdrawn(tx, record.model, WITHDRAWN_MAX)),
        untrained=tuple(await queries.untrained(tx, record.model, WITHDRAWN_MAX)),
        pinned=record.pinned,
        paused=record.paused,
        split=_split(under_way),
    )


def _split(under_way: Sequence[KeptRollout]) -> TrafficSplit | None:
    """The candidates that have users."""
    canaries = [one for one in under_way if one.phase == "canary"]
    if not canaries:
        return None
    first = canaries[0]
    arms = [
        Arm(rollout_id=one.rollout_id, version=one.version, slot=one.slot, share=str(one.share)) for one in canaries
    ]
    return TrafficSplit(unit=first.plan.unit, salt=first.salt, slots=first.slots, arms=tuple(arms))


async def _serve(tx: AsyncConnection, record: ModelRecord, under_way: Sequence[str]) -> tuple[ServedVersion, ...]:
    """Champion, previous, those under way, candidate, anchor, what somebody asked for, and before each adapter the base
    that it applies to."""
    found: dict[str, ServedVersion] = {}
    asked = await queries.asked_for(tx, record.model)
    for name in (record.champion, record.previous, *under_way, record.candidate, record.anchor, *asked):
        version = await store.version(tx, name) if name else None
        base = await store.version(tx, version.base) if version and version.base else None
        for one in (base, version):
            if one is not None:
                found[one.version] = ServedVersion(version=one.version, manifest=one.manifest)
    return tuple(found.values())


async def _save(tx: AsyncConnection, routing: Routing) -> Sequence[Routing]:
    values = {"revision": routing.revision, "routing": routing.to_json().decode()}
    await tx.execute(update(MODELS).where(MODELS.c.model == routing.model).values(values))
    return (routing,)


def _content(routing: Routing) -> object:
    held = routing.pinned, routing.paused
    return routing.aliases, routing.names, routing.serve, routing.withdrawn, routing.untrained, routing.split, held
