"""Retires versions: they never serve again, and their files may be collected."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.catalog import queries
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.rollouts import kept
from headrace_registry.tables import VERSIONS
from headrace_registry.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused


async def retire(
    tx: AsyncConnection, now: datetime, transition: Transition, model: ModelRecord, version: VersionRecord
) -> None:
    """Raises `Refused` 409 with what uses it."""
    used = await users(tx, model, version)
    if used:
        raise Refused(409, "in_use", f"{version.version} is used: {'; '.join(used)}", "version")
    if not version.retired:
        values = {"retired_ms": epoch_ms(now), "request": "", "served": False}
        await tx.execute(update(VERSIONS).where(VERSIONS.c.version == version.version).values(values))
        transition.touch(model.model)


async def users(tx: AsyncConnection, model: ModelRecord, version: VersionRecord) -> list[str]:
    """What of the registry's own state needs a version, in words."""
    name = version.version
    roles = {
        "the champion": model.champion,
        "the previous version, to roll back to": model.previous,
        "the candidate": model.candidate,
        "the anchor": model.anchor,
        "pinned": model.pinned,
    }
    found = [f"it is {role} of {model.model}" for role, holder in roles.items() if holder == name]
    going_on = [one for one in await kept.under_way(tx, model.model) if name in (one.version, one.control)]
    found += [f"rollout {one.rollout_id} is under way with it" for one in going_on]
    found += [f"alias {alias} names it" for alias in await queries.aliases_of(tx, name)]
    found += ["it is served because somebody asked for it"] if version.served else []
    query = select(VERSIONS.c.version).where(VERSIONS.c.base == name, VERSIONS.c.retired_ms.is_(None))
    adapters = list((await tx.execute(query.where(VERSIONS.c.state != "withdrawn").limit(3))).scalars())
    return found + [f"{adapter} is an adapter of it" for adapter in adapters]
