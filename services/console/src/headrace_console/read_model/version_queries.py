"""Queries about versions: the training of each, the sessions that it answered, and audit tasks that two have played."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Subquery, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import unpack_id, unpack_numbers
from headrace_console.read_model.queries import (
    PAGE_ROWS,
    Row,
    numbers_of,
    read_rows,
    read_turns,
    tenants,
    texts_of,
    turns_query,
)
from headrace_console.read_model.status import split_status
from headrace_console.settings import Scope
from headrace_runtime.storage.tables import is_one_of

SESSIONS_MAX = 5_000
"""Largest number of sessions of a version that are summed up: the newest ones."""
TASKS_MAX = 20


@dataclass(frozen=True, slots=True)
class VersionTraffic:
    """Sums over the newest sessions whose last answer a version gave, without evaluation sessions.

    Turns and tokens are counted only where the version answered. Thumbs and rewards are those of whole sessions.
    """

    sessions: int = 0
    turns: int = 0
    tokens: int = 0
    trained: int = 0
    dropped: int = 0
    up: int = 0
    """Sessions with a thumb up."""
    down: int = 0
    rewards: int = 0
    """Sessions with a reward."""
    reward_mean: float = 0.0
    reward_square: float = 0.0
    """Mean of the squares of the rewards."""

    @property
    def reward_error(self) -> float:
        """Standard error of the mean reward."""
        variance = max(0.0, self.reward_square - self.reward_mean**2)
        return math.sqrt(variance / (self.rewards - 1)) if self.rewards > 1 else math.inf


async def version_traffic(tx: AsyncConnection, tenant: int, version: str) -> VersionTraffic:
    """Return counts of sessions, turns, tokens, thumbs and rewards of a version, summed over its newest `SESSIONS_MAX`
    sessions.
    """
    rows = await _newest(tx, tenant, version)
    columns, turns = rows.c, tables.turns
    is_training = tables.is_no_evaluation(columns.flags)
    query = select(
        func.count(),
        *(func.coalesce(func.sum(case((columns.thumb == thumb, 1), else_=0)), 0) for thumb in (1, -1)),
        func.count(columns.reward),
        func.coalesce(func.avg(columns.reward), 0.0),
        func.coalesce(func.avg(columns.reward * columns.reward), 0.0),
    ).where(is_training)
    sessions, up, down, rewards, mean, square = (await tx.execute(query)).one()
    by_status_query = select(turns.c.status, func.count(), func.sum(turns.c.sampled_tokens))
    by_status_query = by_status_query.join(rows, columns.id == turns.c.session)
    by_status_query = by_status_query.where(
        is_training, turns.c.version == columns.version, turns.c.status > 0
    ).group_by(turns.c.status)
    by_status = (await tx.execute(by_status_query)).all()
    texts = await texts_of(tx, (status for status, _, _ in by_status))
    kinds: Counter[str] = Counter()
    for status, number, _ in by_status:
        kinds[split_status(texts[status])[0]] += number
    sums = kinds.total(), sum(int(tokens) for *_, tokens in by_status), kinds["trained"], kinds["dropped"]
    return VersionTraffic(sessions, *sums, int(up), int(down), rewards, float(mean), float(square))


async def shared_tasks(tx: AsyncConnection, tenant: int, first: str, second: str) -> list[tuple[str, str, str]]:
    """Return tasks that occur among the newest sessions of both versions, including evaluation, the latest task first.

    Each is its id, with the response id of the newest answer of each version.
    """
    sides = [await _by_task(tx, tenant, version) for version in (first, second)]
    left, right = sides
    query = select(left.c.task_id, left.c.session.label("first"), right.c.session.label("second"))
    query = query.join(right, right.c.task_id == left.c.task_id).order_by(left.c.session.desc()).limit(TASKS_MAX)
    rows = (await tx.execute(query)).all()
    table = tables.turns
    last = (
        select(table.c.session, func.max(table.c.id).label("turn"))
        .where(table.c.session.in_({number for row in rows for number in row[1:]}), table.c.log_offset >= 0)
        .group_by(table.c.session)
        .subquery()
    )
    newest = await read_turns(tx, turns_query().join(last, last.c.turn == table.c.id))
    names = {turn["session"]: unpack_id(turn["name"]) for turn in newest}
    return [
        (row.task_id, names[row.first], names[row.second]) for row in rows if row.first in names and row.second in names
    ]


async def _newest(tx: AsyncConnection, tenant: int, version: str) -> Subquery:
    """Return an indexed subquery for the newest `SESSIONS_MAX` sessions whose last answer a version gave."""
    table, number = tables.sessions, (await numbers_of(tx, [version])).get(version, 0)
    query = select(table).where(table.c.tenant == tenant, table.c.version == number, table.c.began_ms > 0)
    return query.order_by(table.c.began_ms.desc()).limit(SESSIONS_MAX).subquery()


async def _by_task(tx: AsyncConnection, tenant: int, version: str) -> Subquery:
    rows = await _newest(tx, tenant, version)
    query = select(rows.c.task_id, func.max(rows.c.id).label("session")).where(rows.c.task_id.is_not(None))
    return query.group_by(rows.c.task_id).subquery()


@dataclass(frozen=True, slots=True)
class VersionTraining:
    """Experiences that were trained between a version and the version before it, for the tenants of a scope."""

    lineage: str
    step: int
    counts: Mapping[str, int]
    """Trained revisions by direction: `up`, `down`, `unchanged` and `not reported`."""
    rows: Sequence[Row]
    """At most 100 trained revisions, each with its experience and its session."""


async def version_training(
    tx: AsyncConnection, scope: Scope, version: str, *, is_ascending: bool
) -> VersionTraining | None:
    """Return the experiences trained since the version before `version`, or None before the trainer has reported them.

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
    """Return, for each save (checkpoint of the trainer), the first version that contains it, with its step and lineage.

    A save that no version contains yet has its own step, and 0 as the version.

    Returns:
        Step, lineage and version by save; lineages and versions as numbers in the table of names.
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
    """Runs (trajectories) of sessions, numbered from 1 within each session in the order of their first turns."""

    of_turn: Mapping[int, int]
    """Number of the run that contains a turn, by the turn's id."""
    first_turns: Mapping[int, int]
    """Id of the first turn of each trajectory, by the trajectory's id."""
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
