"""Serves a version because an operator requests it, besides the versions with a role."""

from __future__ import annotations

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.catalog import aliases, queries, served_limit
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.tables import VERSIONS
from headrace_registry.transition import Transition
from headrace_runtime.errors import Refused


async def serve(
    tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord, served_max: int
) -> None:
    """Let replicas load and probe the version. The first version of a model without a trainer becomes its champion."""
    await aliases.check_servable(tx, model, version.version)
    await _set_served(tx, version.version, True)
    await served_limit.check_served_limit(tx, served_max)
    if model.champion is None and model.candidate is None and not await queries.has_trained_version(tx, model.model):
        await transition.request(version, "force")
    transition.mark_changed(model.model)


async def unserve(tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord) -> None:
    """Let replicas drop the version. Raises `Refused` 409 if an alias names it or a role of a trained model needs
    it."""
    aliases_naming = await queries.aliases_of(tx, version.version)
    if aliases_naming:
        raise Refused(
            409,
            "aliased",
            f"{version.version} is named by {', '.join(aliases_naming)}; move these aliases first",
            "version",
        )
    if version.version in (model.champion, model.candidate):
        if await queries.has_trained_version(tx, model.model):
            raise Refused(409, "has_a_role", f"{version.version} is champion or candidate of {model.model}", "version")
        await transition.clear_roles(model)
    await _set_served(tx, version.version, False)
    transition.mark_changed(model.model)


async def _set_served(tx: AsyncConnection, name: str, served: bool) -> None:
    await tx.execute(update(VERSIONS).where(VERSIONS.c.version == name).values(served=served))
