"""Aliases that operators set. A request moves all of its aliases by compare-and-swap, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import changes, lifecycle, store
from headrace_registry.catalog import queries, served_limit
from headrace_registry.records import ModelRecord
from headrace_registry.tables import ALIASES
from headrace_registry.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas.http.catalog import AliasMove

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
    current = await queries.aliases(tx, model.model)
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
    await served_limit.check_served_limit(tx, served_max)
    transition.mark_changed(model.model)
    return json.dumps({alias: [move.expected, move.version] for alias, move in sorted(moves.items())})


async def _check(tx: AsyncConnection, model: ModelRecord, alias: str, move: AliasMove, current: str | None) -> None:
    if alias in ROLES:
        raise Refused(409, "role", f"{alias} is moved by promote, rollback and the gate alone", "moves")
    owner = await queries.version_with_label(tx, model.model, alias)
    if owner is not None:
        raise Refused(409, "label_taken", f"{alias} is the label of {owner}, and labels never move", "moves")
    if current not in (move.expected, move.version):  # a repeated request succeeds without a change
        target = f"names {current}" if current else "names nothing"
        raise Refused(409, "alias_moved", f"alias {alias} of {model.model} {target} now, not {move.expected}", "moves")
    if move.version is not None:
        await check_servable(tx, model, move.version)


async def check_servable(tx: AsyncConnection, model: ModelRecord, name: str) -> None:
    """Raise `Refused` for a version that could not serve this model."""
    version = await changes.require_version(tx, model, name)
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
