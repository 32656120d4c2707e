"""Limits how many requested versions replicas hold, so that room is left for trained versions."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import store
from headrace_registry.catalog import queries
from headrace_runtime.errors import Refused


async def check_served_limit(tx: AsyncConnection, served_max: int) -> None:
    """Raise `Refused` 409 when more versions are requested than `registry.served_max`. Bases of adapters count."""
    requested = await queries.all_requested_versions(tx)
    bases = [version.base for name in requested if (version := await store.load_version(tx, name)) and version.base]
    counted = [name for name in dict.fromkeys([*requested, *bases]) if not await _has_a_role(tx, name)]
    if len(counted) > served_max:
        raise Refused(
            409,
            "no_room",
            f"{len(counted)} versions would be served besides champions and candidates, registry.served_max is "
            f"{served_max}; unserve one of {', '.join(counted[:8])}",
            "version",
        )


async def _has_a_role(tx: AsyncConnection, name: str) -> bool:
    """Return whether replicas hold the version because of a role."""
    version = await store.load_version(tx, name)
    model = await store.load_model(tx, version.model) if version else None
    return model is not None and name in (model.champion, model.previous, model.candidate, model.anchor)
