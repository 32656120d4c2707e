"""Queries of the experiences that a version was trained on since the previous version, and of the training of one
turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import unpack_numbers
from headrace_console.read_model.queries import PAGE_ROWS, Row, numbers_of, tenants, texts_of
from headrace_console.users import Scope


@dataclass(frozen=True, slots=True)
class VersionTraining:
    """Training between a version and the previous version. Counts and rows are of the tenants of one scope."""

    lineage: str
    step: int
    counts: Mapping[str, int]
    """Trained revisions by direction: `up`, `down`, `unchanged` and `not reported`."""
    rows: Sequence[Row]
    """At most 100 trained revisions, each with its experience and its session."""


async def version_training(
    tx: AsyncConnection, scope: Scope, version: str, *, is_ascending: bool
) -> VersionTraining | None:
    """Return what a version was trained on, or None before its training was reported.

    Args:
        tx: the transaction.
        scope: the tenants whose sessions are listed and counted.
        version: the version.
        is_ascending: whether rows with the smallest advantage come first, and not those with the largest.
    """
    steps = tables.steps
    number = (await numbers_of(tx, [version])).get(version, 0)
    newest = select(steps).where(steps.c.version == number).order_by(steps.c.account).limit(1)
    save = (await tx.execute(newest)).first()
    if save is None:
        return None
    before = select(func.max(steps.c.account)).where(
        steps.c.lineage == save.lineage, steps.c.account < save.account, steps.c.version.is_not(None)
    )
    previous = await tx.scalar(before)
    trained, sessions, experiences = tables.trained_revisions, tables.sessions, tables.experiences
    selection: list[ColumnElement[bool]] = [
        trained.c.lineage == save.lineage,
        trained.c.save > (-1 if previous is None else previous),
        trained.c.save <= save.account,
    ]
    if scope.tenants is not None:
        selection.append(sessions.c.tenant.in_((await tenants(tx, scope)).values()))
    joined = trained.join(experiences, experiences.c.id == trained.c.experience)
    joined = joined.join(sessions, sessions.c.id == experiences.c.session)
    order = trained.c.advantage.asc() if is_ascending else trained.c.advantage.desc()
    columns: list[Any] = [
        trained, experiences.c.reward, experiences.c.turns, experiences.c.history, sessions.c.session_key,
        sessions.c.session_id, sessions.c.title,
    ]  # fmt: skip
    query = select(*columns).select_from(joined).where(*selection)
    query = query.order_by(order.nulls_last(), trained.c.experience, trained.c.revision).limit(PAGE_ROWS)
    rows = [dict(row) for row in (await tx.execute(query)).mappings()]
    lineage = (await texts_of(tx, [save.lineage]))[save.lineage]
    counts = (await tx.execute(select(*_counts(trained.c.advantage)).select_from(joined).where(*selection))).mappings()
    totals = {name.replace("_", " "): int(total or 0) for name, total in counts.one().items()}
    return VersionTraining(lineage, save.step, totals, rows)


def _counts(advantage: ColumnElement[Any]) -> list[ColumnElement[Any]]:
    conditions = {
        "up": advantage > 0,
        "down": advantage < 0,
        "unchanged": advantage == 0,
        "not_reported": advantage.is_(None),
    }
    return [func.sum(case((condition, 1), else_=0)).label(name) for name, condition in conditions.items()]


_TURN_EXPERIENCES_MAX = 64


async def experiences_of_turn(tx: AsyncConnection, turn: Row) -> list[Row]:
    """Return at most 64 experiences that contain a turn, the newest first."""
    table, numbers = tables.experiences, unpack_numbers(turn["experiences"])
    query = select(table).where(table.c.id.in_(numbers[-_TURN_EXPERIENCES_MAX:])).order_by(table.c.id.desc())
    return [dict(row) for row in (await tx.execute(query)).mappings()]
