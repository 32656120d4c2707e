"""Queries of the experiences that a version was trained on since the previous version, and of the training of one
turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import unpack_numbers
from headrace_console.read_model.queries import PAGE_ROWS, Row, numbers_of, read_rows, tenants, texts_of
from headrace_console.users import Scope
from headrace_runtime.storage.tables import is_one_of


@dataclass(frozen=True, slots=True)
class VersionTraining:
    """Training between a version and the version before it, for the tenants of a scope."""

    lineage: str
    step: int
    counts: Mapping[str, int]
    """Trained revisions by direction: `up`, `down`, `unchanged` and `not reported`."""
    rows: Sequence[Row]
    """At most 100 trained revisions, each with its experience and its session."""


async def version_training(
    tx: AsyncConnection, scope: Scope, version: str, *, is_ascending: bool
) -> VersionTraining | None:
    """Return the training of a version since the version before it, or None before its training was reported.

    Args:
        tx: the transaction.
        scope: the tenants whose sessions are listed and counted.
        version: the version.
        is_ascending: whether rows are ordered from the smallest advantage to the largest, instead of the reverse.
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
        trained, experiences.c.reward, experiences.c.turns, experiences.c.history, experiences.c.session,
        sessions.c.session_key, sessions.c.session_id, sessions.c.title,
    ]  # fmt: skip
    query = select(*columns).select_from(joined).where(*selection)
    query = query.order_by(order.nulls_last(), trained.c.experience, trained.c.revision).limit(PAGE_ROWS)
    rows = await read_rows(tx, query)
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


async def steps_of(
    tx: AsyncConnection, saves: Collection[tuple[int, int]]
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return, for each of these saves of lineages, step, lineage and version of the first version that contains it.

    A save that no version contains yet has its own step, and 0 as the version.
    """
    table, later, version = tables.steps, tables.steps.alias(), tables.steps.alias()
    if not saves:
        return {}
    follows = (later.c.lineage == table.c.lineage) & (later.c.account >= table.c.account)
    first = select(func.min(later.c.account)).where(follows, later.c.version.is_not(None)).scalar_subquery()
    contains = (version.c.lineage == table.c.lineage) & (version.c.account == first)
    query = select(table.c.lineage, table.c.account, table.c.step, version.c.step.label("last"), version.c.version)
    query = query.select_from(table.outerjoin(version, contains))
    rows = await tx.execute(query.where(is_one_of(table.c.lineage, table.c.account, saves)))
    return {
        (row.lineage, row.account): (row.step if row.last is None else row.last, row.lineage, row.version or 0)
        for row in rows
    }


_RUNS_MAX = 5_000


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of sessions, numbered from 1 within each session in the order of their first turns."""

    of_turn: Mapping[int, int]
    """Number of each turn's run."""
    first_turns: Mapping[int, int]
    """First turn of each trajectory."""
    count: int


async def runs_of(tx: AsyncConnection, sessions: Collection[int]) -> Runs:
    """Return the published runs of sessions, at most 5,000 of them."""
    table = tables.trajectories
    query = select(table.c.session, table.c.id, table.c.turns).where(table.c.session.in_(sessions))
    rows = (await tx.execute(query.order_by(table.c.id).limit(_RUNS_MAX))).all()
    runs = sorted((min(turns), row.id, row.session, turns) for row in rows if (turns := unpack_numbers(row.turns)))
    of_turn: dict[int, int] = {}
    numbers: Counter[int] = Counter()
    for _, _, session, turns in runs:
        numbers[session] += 1
        of_turn |= dict.fromkeys(turns, numbers[session])
    return Runs(of_turn, {run: first for first, run, *_ in runs}, len(runs))


_TURN_EXPERIENCES_MAX = 64


async def experiences_of_turn(tx: AsyncConnection, turn: Row) -> list[Row]:
    """Return at most 64 experiences that contain a turn, the newest first."""
    table, numbers = tables.experiences, unpack_numbers(turn["experiences"])
    query = select(table).where(table.c.id.in_(numbers[-_TURN_EXPERIENCES_MAX:]))
    return await read_rows(tx, query.order_by(table.c.id.desc()))
