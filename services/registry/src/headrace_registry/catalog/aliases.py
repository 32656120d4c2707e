"""Versions that operators serve: by an alias, or by a request besides the versions with a role.

A request moves all of its aliases by compare-and-swap, or none. The number of requested versions that replicas hold is
limited, so that room is left for trained versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import store
from headrace_registry.storage.records import ModelRecord, VersionRecord
from headrace_registry.storage.tables import ALIASES, VERSIONS
from headrace_registry.versions import lifecycle
from headrace_registry.versions.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas.http.catalog import AliasMove


async def check_served_limit(tx: AsyncConnection, served_max: int) -> None:
    """Raise `Refused` 409 when more versions are requested than `registry.served_max`. Bases of adapters count."""
    requested = await store.all_requested_versions(tx)
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


ROLES = frozenset(("champion", "canary", "previous", "candidate", "anchor"))
"""Names that only the registry's own decisions move."""
ALIASES_MAX = 128
"""Largest number of aliases of one model."""


async def move_aliases(
    tx: AsyncConnection,
    now: datetime,
    transition: Transition,
    model: ModelRecord,
    moves: Mapping[str, AliasMove],
    served_max: int,
) -> str:
    """Make all `moves` and return them as JSON for the audit log. Raises `Refused` 409 when one alias is not as
    expected."""
    current = await store.aliases(tx, model.model)
    for alias, move in moves.items():
        await _check(tx, model, alias, move, current.get(alias))
    alias_count = sum(
        moves[alias].version is not None if alias in moves else True for alias in current.keys() | moves.keys()
    )
    if alias_count > ALIASES_MAX:
        raise Refused(
            409, "too_many_aliases", f"model {model.model} would have {alias_count} aliases, {ALIASES_MAX} are the most"
        )
    for alias, move in moves.items():
        if current.get(alias) != move.version:
            await _move(tx, now, model.model, alias, move)
    await check_served_limit(tx, served_max)
    transition.mark_changed(model.model)
    return json.dumps({alias: [move.expected, move.version] for alias, move in sorted(moves.items())})


async def _check(tx: AsyncConnection, model: ModelRecord, alias: str, move: AliasMove, current: str | None) -> None:
    if alias in ROLES:
        raise Refused(409, "role", f"{alias} is moved by promote, rollback and the gate alone", "moves")
    owner = await store.version_with_label(tx, model.model, alias)
    if owner is not None:
        raise Refused(409, "label_taken", f"{alias} is the label of {owner}, and labels never move", "moves")
    if current not in (move.expected, move.version):  # a repeated request succeeds without a change
        target = f"names {current}" if current else "names nothing"
        raise Refused(409, "alias_moved", f"alias {alias} of {model.model} {target} now, not {move.expected}", "moves")
    if move.version is not None:
        await check_servable(tx, model, move.version)


async def check_servable(tx: AsyncConnection, model: ModelRecord, name: str) -> None:
    """Raise `Refused` for a version that could not serve this model."""
    version = await store.require_version(tx, model, name)
    if version.state in ("withdrawn", "rejected"):
        raise Refused(409, version.state, f"{name} was {version.state}; it cannot be served", "version")
    problem = lifecycle.incompatibility(version, await store.load_view(tx, model, "", version))
    if problem:
        raise Refused(409, "incompatible_version", f"{name}: {problem}", "version")


async def _move(tx: AsyncConnection, now: datetime, model: str, alias: str, move: AliasMove) -> None:
    """Move one alias. The statement checks the expected version again, in case another transaction moved the alias."""
    alias_row = (ALIASES.c.model == model) & (ALIASES.c.alias == alias)
    values = {"version": move.version, "changed_ms": epoch_ms(now)}
    if move.expected is None:
        if move.version is not None:
            await tx.execute(insert(ALIASES).values(model=model, alias=alias, **values))
        return
    unchanged = alias_row & (ALIASES.c.version == move.expected)
    statement = (
        delete(ALIASES).where(unchanged) if move.version is None else update(ALIASES).where(unchanged).values(values)
    )
    changed = (await tx.execute(statement)).rowcount
    assert changed == 1, f"alias {alias} of {model} moved inside a transaction that holds the lease"


async def serve(
    tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord, served_max: int
) -> None:
    """Let replicas load and probe the version. The first version of a model without a trainer becomes its champion."""
    await check_servable(tx, model, version.version)
    await _set_served(tx, version.version, True)
    await check_served_limit(tx, served_max)
    if model.champion is None and model.candidate is None and not await store.has_trained_version(tx, model.model):
        await transition.request(version, "force")
    transition.mark_changed(model.model)


async def unserve(tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord) -> None:
    """Let replicas drop the version. Raises `Refused` 409 if an alias names it or a role of a trained model needs
    it."""
    aliases_naming = await store.aliases_of(tx, version.version)
    if aliases_naming:
        raise Refused(
            409,
            "aliased",
            f"{version.version} is named by {', '.join(aliases_naming)}; move these aliases first",
            "version",
        )
    if version.version in (model.champion, model.candidate):
        if await store.has_trained_version(tx, model.model):
            raise Refused(409, "has_a_role", f"{version.version} is champion or candidate of {model.model}", "version")
        await transition.clear_roles(model)
    await _set_served(tx, version.version, False)
    transition.mark_changed(model.model)


async def _set_served(tx: AsyncConnection, name: str, served: bool) -> None:
    await tx.execute(update(VERSIONS).where(VERSIONS.c.version == name).values(served=served))
