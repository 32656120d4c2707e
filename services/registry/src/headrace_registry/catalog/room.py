"""How many versions replicas hold because somebody asked: those of training must find room beside them."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import store
from headrace_registry.catalog import queries
from headrace_runtime.errors import Refused


async def check(tx: AsyncConnection, served_max: int) -> None:
    """Raises `Refused` 409 when more is asked for than `registry.served_max`. Bases of adapters count."""
    asked = await queries.all_asked_for(tx)
    bases = [version.base for name in asked if (version := await store.version(tx, name)) and version.base]
    held = [name for name in dict.fromkeys([*asked, *bases]) if not await _has_a_role(tx, name)]
    if len(held) > served_max:
        raise Refused(
            409,
            "no_room",
            f"{len(held)} versions would be served besides champions and candidates, registry.served_max is "
            f"{served_max}; unserve one of {', '.join(held[:8])}",
            "version",
        )


async def _has_a_role(tx: AsyncConnection, name: str) -> bool:
    """It would be held anyway."""
    version = await store.version(tx, name)
    model = await store.model(tx, version.model) if version else None
    return model is not None and name in (model.champion, model.previous, model.candidate, model.anchor)
