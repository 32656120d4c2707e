"""Serves a version because somebody asks for it, beside whatever has a role."""

from __future__ import annotations

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.catalog import aliases, queries, room
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.tables import VERSIONS
from headrace_registry.transition import Transition
from headrace_runtime.errors import Refused


async def serve(
    tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord, served_max: int
) -> None:
    """Replicas load and probe it. The first version of a model that nobody trains becomes its champion by that."""
    await aliases.check_servable(tx, model, version.version)
    await _set_served(tx, version.version, True)
    await room.check(tx, served_max)
    if model.champion is None and model.candidate is None and not await queries.any_trained(tx, model.model):
        await transition.request(version, "force")
    transition.touch(model.model)


async def unserve(tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord) -> None:
    """Let replicas drop it. A role keeps it, unless its model is one that nobody trains."""
    named = await queries.aliases_of(tx, version.version)
    if named:
        raise Refused(409, "aliased", f"{version.version} is named by {', '.join(named)}; move that first", "version")
    if version.version in (model.champion, model.candidate):
        if await queries.any_trained(tx, model.model):
            raise Refused(409, "has_a_role", f"{version.version} is champion or candidate of {model.model}", "version")
        await transition.vacate(model)
    await _set_served(tx, version.version, False)
    transition.touch(model.model)


async def _set_served(tx: AsyncConnection, name: str, served: bool) -> None:
    await tx.execute(update(VERSIONS).where(VERSIONS.c.version == name).values(served=served))
