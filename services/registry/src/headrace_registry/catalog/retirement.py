"""Retires versions: they never serve again, and their files may be collected."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.catalog import queries
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.rollouts import rollout_store
from headrace_registry.tables import VERSIONS
from headrace_registry.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused


async def retire(
    tx: AsyncConnection, now: datetime, transition: Transition, model: ModelRecord, version: VersionRecord
) -> None:
    """Retire a version. Raises `Refused` 409 with the reasons if it is in use."""
    reasons = await reasons_in_use(tx, model, version)
    if reasons:
        raise Refused(409, "in_use", f"{version.version} is used: {'; '.join(reasons)}", "version")
    if not version.retired:
        values = {"retired_ms": epoch_ms(now), "request": "", "served": False}
        await tx.execute(update(VERSIONS).where(VERSIONS.c.version == version.version).values(values))
        transition.mark_changed(model.model)


async def reasons_in_use(tx: AsyncConnection, model: ModelRecord, version: VersionRecord) -> list[str]:
    """Return why the registry's own state needs a version."""
    name = version.version
    roles = {
        "the champion": model.champion,
        "the previous version, to roll back to": model.previous,
        "the candidate": model.candidate,
        "the anchor": model.anchor,
        "pinned": model.pinned,
    }
    reasons = [f"it is {role} of {model.model}" for role, role_version in roles.items() if role_version == name]
    rollouts = [
        rollout
        for rollout in await rollout_store.rollouts_under_way(tx, model.model)
        if name in (rollout.version, rollout.control)
    ]
    reasons += [f"rollout {rollout.rollout_id} is under way with it" for rollout in rollouts]
    reasons += [f"alias {alias} names it" for alias in await queries.aliases_of(tx, name)]
    reasons += ["an operator serves it"] if version.served else []
    query = select(VERSIONS.c.version).where(VERSIONS.c.base == name, VERSIONS.c.retired_ms.is_(None))
    adapters = list((await tx.execute(query.where(VERSIONS.c.state != "withdrawn").limit(3))).scalars())
    return reasons + [f"{adapter} is an adapter of it" for adapter in adapters]
