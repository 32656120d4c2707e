"""Rewards of each source in a period, and the scores that sources gave to the same runs and turns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import func, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.queries import SEARCHED_MAX, texts_of
from headrace_console.read_model.queues import nearest_score
from headrace_runtime.storage.tables import count_rows

SESSIONS_MAX = 500
"""Largest number of sessions whose scores are compared: the newest ones with rewards, without evaluations."""
EDITED_MAX = 10_000
_SCORES_MAX = 5_000
Target = tuple[int, int, int]
"""Trajectory, turn (0: the whole run) and choice (-1: all answers) that a reward is about."""
Scores = Mapping[str, Mapping[Target, Mapping[str, float]]]
"""For each model and target, the score by source."""


@dataclass(frozen=True, slots=True)
class SourceRewards:
    """Rewards of one source: their counts by outcome and by bucket of the value (`bucket_of`), and the mean value."""

    outcomes: Mapping[str, int]
    buckets: Mapping[int, int]
    mean: float | None
    """Mean of the values, or None if there are none."""


async def rewards_by_source(tx: AsyncConnection, tenant: int, since_hour: int) -> dict[str, SourceRewards]:
    """Return the number, the distribution and the mean of a tenant's rewards by source.

    Args:
        since_hour: hour from which rewards are counted, in hours since 1970.
    """
    table = tables.hours
    kind = table.c.source, table.c.outcome, table.c.bucket
    query = select(*kind, func.sum(table.c.rewards), func.sum(table.c.total))
    query = query.where(table.c.tenant == tenant, table.c.hour >= since_hour)
    rows = (await tx.execute(query.group_by(*kind))).all()
    texts = await texts_of(tx, {number for row in rows for number in (row.source, row.outcome)})
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    buckets: dict[str, Counter[int]] = defaultdict(Counter)
    totals: dict[str, float] = defaultdict(float)
    for source, outcome, bucket, number, total in rows:
        name = texts[source]
        outcomes[name][texts[outcome]] += int(number)
        if bucket != tables.NO_VALUE:
            buckets[name][bucket] += int(number)
            totals[name] += total or 0.0
    return {
        name: SourceRewards(
            outcomes[name], buckets[name], totals[name] / count if (count := buckets[name].total()) else None
        )
        for name in sorted(outcomes)
    }


async def edited_sessions(tx: AsyncConnection, tenant: int, since_ms: int) -> int:
    """Return the number of sessions that began in a period and have an edited answer, at most `EDITED_MAX`."""
    table = tables.sessions
    condition = (table.c.tenant == tenant) & (table.c.began_ms >= since_ms) & table.c.edits.is_not(None)
    return await count_rows(tx, condition, table, EDITED_MAX)


async def common_scores(tx: AsyncConnection, tenant: int, since_ms: int) -> Scores:
    """Return the scores of the newest sessions with rewards in a period, without evaluation sessions.

    A score is a reward from 0 to 1, rounded to the nearest score that raters can give. At most 5,000 scores of the
    newest 5,000 sessions are read.
    """
    sessions, trajectories, rewards = tables.sessions, tables.trajectories, tables.rewards
    newest = select(sessions.c.began_ms)
    newest = newest.where(sessions.c.tenant == tenant, sessions.c.began_ms > max(0, since_ms - 1))
    searched = newest.order_by(sessions.c.began_ms.desc()).limit(SEARCHED_MAX).subquery()
    horizon = select(func.min(searched.c.began_ms)).scalar_subquery()
    # PostgreSQL turns an EXISTS into a join that may read all rewards, and leaves a subquery with a limit alone.
    reward = select(rewards.c.source).join(trajectories, trajectories.c.id == rewards.c.trajectory)
    reward = reward.where(trajectories.c.session == sessions.c.id).limit(1)
    recent = (
        select(sessions.c.id, sessions.c.model, sessions.c.began_ms)
        .where(sessions.c.tenant == tenant, sessions.c.began_ms >= horizon, reward.scalar_subquery().is_not(None))
        .where(tables.is_no_evaluation(sessions.c.flags))
        .order_by(sessions.c.began_ms.desc())
        .limit(SESSIONS_MAX)
        .subquery()
    )
    # Without LATERAL and a limit, PostgreSQL reads all trajectories for a hash join. SQLite knows no LATERAL.
    run = select(trajectories.c.id).where(trajectories.c.session == recent.c.id).limit(_SCORES_MAX)
    is_postgresql = tx.dialect.name == "postgresql"
    runs, is_run = (run.lateral(), true()) if is_postgresql else (trajectories, trajectories.c.session == recent.c.id)
    target = rewards.c.trajectory, rewards.c.turn, rewards.c.choice
    query = select(recent.c.model, rewards.c.source, rewards.c.value, *target).select_from(recent).join(runs, is_run)
    query = query.join(rewards, rewards.c.trajectory == runs.c.id).where(rewards.c.value.between(0, 1))
    query = query.order_by(recent.c.began_ms.desc(), rewards.c.trajectory.desc()).limit(_SCORES_MAX)
    rows = (await tx.execute(query)).all()
    texts = await texts_of(tx, {number for row in rows for number in (row.model, row.source)})
    scores: dict[str, dict[Target, dict[str, float]]] = {}
    for model, source, value, *about in rows:
        by_target = scores.setdefault(texts[model], {})
        by_target.setdefault((about[0], about[1], about[2]), {})[texts[source]] = nearest_score(value)
    return scores
