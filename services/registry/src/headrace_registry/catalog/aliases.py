"""Aliases that operators set. They move by compare-and-swap, several at once or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import changes, lifecycle, store
from headrace_registry.catalog import queries, room
from headrace_registry.records import ModelRecord
from headrace_registry.tables import ALIASES
from headrace_registry.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas.catalog import AliasMove

ROLES = frozenset(("champion", "canary", "previous", "candidate", "anchor"))
"""Names that the registry's own decisions move, and nobody else."""
ALIASES_MAX = 128
"""Of one model."""


async def move(
    tx: AsyncConnection,
    now: datetime,
    transition: Transition,
    model: ModelRecord,
    moves: Mapping[str, AliasMove],
    served_max: int,
) -> str:
    """Make all `moves`. Returns what they were, for the audit log. Raises `Refused` 409 when one is not as expected."""
    present = await queries.aliases(tx, model.model)
    for alias, one in moves.items():
        await _check(tx, model, alias, one, present.get(alias))
    kept = sum(moves[alias].version is not None if alias in moves else True for alias in present.keys() | moves.keys())
    if kept > ALIASES_MAX:
        raise Refused(
            409, "too_many_aliases", f"model {model.model} would have {kept} aliases, {ALIASES_MAX} are the most"
        )
    for alias, one in moves.items():
        if present.get(alias) != one.version:
            await _move(tx, now, model.model, alias, one)
    await room.check(tx, served_max)
    transition.touch(model.model)
    return json.dumps({alias: [one.expected, one.version] for alias, one in sorted(moves.items())})


async def _check(tx: AsyncConnection, model: ModelRecord, alias: str, one: AliasMove, present: str | None) -> None:
    if alias in ROLES:
        raise Refused(409, "role", f"{alias} is moved by promote, rollback and the gate alone", "moves")
    owner = await queries.labelled(tx, model.model, alias)
    if owner is not None:
        raise Refused(409, "label_taken", f"{alias} is the label of {owner}, and labels never move", "moves")
    if present not in (one.expected, one.version):  # what is done already is done, whoever asks again
        what = f"names {present}" if present else "names nothing"
        raise Refused(409, "alias_moved", f"alias {alias} of {model.model} {what} now, not {one.expected}", "moves")
    if one.version is not None:
        await check_servable(tx, model, one.version)


async def check_servable(tx: AsyncConnection, model: ModelRecord, name: str) -> None:
    """Raises `Refused` for a version that could not serve this model."""
    version = await changes.version(tx, model, name)
    if version.state in ("withdrawn", "rejected"):
        raise Refused(409, version.state, f"{name} was {version.state}; it cannot be served", "version")
    problem = lifecycle.objection(version, await store.view(tx, model, "", version))
    if problem:
        raise Refused(409, "incompatible_version", f"{name}: {problem}", "version")


async def _move(tx: AsyncConnection, now: datetime, model: str, alias: str, one: AliasMove) -> None:
    """The condition is asked again in the statement itself: what another transaction moved meanwhile is not moved."""
    mine = (ALIASES.c.model == model) & (ALIASES.c.alias == alias)
    values = {"version": one.version, "changed_ms": epoch_ms(now)}
    if one.expected is None:
        if one.version is not None:
            await tx.execute(insert(ALIASES).values(model=model, alias=alias, **values))
        return
    still = mine & (ALIASES.c.version == one.expected)
    statement = delete(ALIASES).where(still) if one.version is None else update(ALIASES).where(still).values(values)
    changed = (await tx.execute(statement)).rowcount
    assert changed == 1, f"alias {alias} of {model} moved inside a transaction that holds the lease"
