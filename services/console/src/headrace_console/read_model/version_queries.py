"""Summaries of a version's sessions, and audit tasks that two versions have both played, for one tenant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Subquery, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.queries import numbers_of, read_turns, texts_of, turns_query
from headrace_console.read_model.status import split_status

SESSIONS_MAX = 5_000
"""Largest number of sessions of a version that are summed up: the newest ones."""
TASKS_MAX = 20


@dataclass(frozen=True, slots=True)
class VersionTraffic:
    """Sums over the newest sessions whose last answer is by a version, without evaluation sessions.

    Turns and tokens are only those that the version answered. Thumbs and rewards are of whole sessions.
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


@dataclass(frozen=True, slots=True)
class SharedTask:
    """A task with the response id of the newest answer of each of two versions."""

    task_id: str
    first: str
    second: str


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


async def shared_tasks(tx: AsyncConnection, tenant: int, first: str, second: str) -> Sequence[SharedTask]:
    """Return tasks that occur among the newest sessions of both versions, including evaluation, the latest first."""
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
        SharedTask(row.task_id, names[row.first], names[row.second])
        for row in rows
        if row.first in names and row.second in names
    ]


async def _newest(tx: AsyncConnection, tenant: int, version: str) -> Subquery:
    """Return a subquery for the newest `SESSIONS_MAX` sessions of a version. It uses an index."""
    table, number = tables.sessions, (await numbers_of(tx, [version])).get(version, 0)
    query = select(table).where(table.c.tenant == tenant, table.c.version == number, table.c.began_ms > 0)
    return query.order_by(table.c.began_ms.desc()).limit(SESSIONS_MAX).subquery()


async def _by_task(tx: AsyncConnection, tenant: int, version: str) -> Subquery:
    rows = await _newest(tx, tenant, version)
    query = select(rows.c.task_id, func.max(rows.c.id).label("session")).where(rows.c.task_id.is_not(None))
    return query.group_by(rows.c.task_id).subquery()
