"""Thumbs, features and fitted reward models in the scorer's database. Functions run in their caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.upsert import upsert
from headrace_scorer.learned.models import Features, Thumb, ThumbedRun
from headrace_scorer.schema import reward_models, run_features, thumbs, trajectories

_TENANTS_MAX = 256


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a reward model of one tenant is fitted to, and until when thumbs were read."""

    tenant: str
    said: tuple[tuple[str, str, str, float], ...]
    """Of each thumb: the trajectory, its features as JSON, the rater, the value."""
    elsewhere: tuple[str, ...]
    """Features of runs that nobody spoke of."""
    read_until_ms: int

    def runs(self) -> list[ThumbedRun]:
        """Reads JSON, up to some megabytes: not for an event loop."""
        found: dict[str, tuple[str, list[Thumb]]] = {}
        for trajectory_id, features, rater, value in self.said:
            found.setdefault(trajectory_id, (features, []))[1].append(Thumb(rater, value))
        return [ThumbedRun(name, json.loads(features), tuple(said)) for name, (features, said) in found.items()]

    def others(self) -> list[Features]:
        return [json.loads(features) for features in self.elsewhere]


async def keep_features(
    tx: AsyncConnection, trajectory_id: str, tenant: str, arrived_ms: int, features: Features
) -> None:
    row = {"tenant": tenant, "features": json.dumps(features, sort_keys=True), "arrived_ms": arrived_ms}
    await upsert(tx, run_features, {"trajectory_id": trajectory_id}, row)


async def keep_thumbs(
    tx: AsyncConnection, now: datetime, trajectory_id: str, tenant: str, said: Mapping[str, float]
) -> None:
    """What each rater says now. Who said something before and is not among them has taken it back."""
    table = thumbs.c
    query = select(table.rater, table.value).where(table.trajectory_id == trajectory_id)
    before: dict[str, float | None] = dict((await tx.execute(query)).tuples().all())
    for rater in sorted({*before, *said}):
        value = said.get(rater)
        if rater not in before or before[rater] != value:
            row = {"tenant": tenant, "value": value, "arrived_ms": epoch_ms(now)}
            await upsert(tx, thumbs, {"trajectory_id": trajectory_id, "rater": rater}, row)


async def due(tx: AsyncConnection, source: str, share: float) -> Sequence[str]:
    """Tenants of whose thumbs at least `share`, and at least one, are new to their reward model."""
    table, model = thumbs.c, reward_models.c
    own = (model.tenant == table.tenant) & (model.source == source)
    new = func.sum(case((table.arrived_ms > func.coalesce(model.read_until_ms, -1), 1), else_=0))
    query = (
        select(table.tenant, func.count(), new)
        .select_from(thumbs.outerjoin(reward_models, own))
        .group_by(table.tenant)
        .order_by(table.tenant)
        .limit(_TENANTS_MAX)
    )
    return [tenant for tenant, count, fresh in await tx.execute(query) if fresh and fresh >= share * count]


async def lesson(tx: AsyncConnection, tenant: str, thumbs_max: int, others_max: int) -> Lesson:
    """The newest runs with thumbs, and the newest without."""
    table, known = thumbs.c, run_features.c
    until: int | None = await tx.scalar(select(func.max(table.arrived_ms)).where(table.tenant == tenant))
    newest = (
        select(table.trajectory_id)
        .where(table.tenant == tenant, table.value.is_not(None))
        .order_by(table.arrived_ms.desc(), table.trajectory_id)
        .limit(thumbs_max)
        .subquery()
    )
    spoken = (
        select(known.trajectory_id, known.features, table.rater, table.value)
        .join(thumbs, table.trajectory_id == known.trajectory_id)
        .where(known.trajectory_id.in_(select(newest.c.trajectory_id)), table.value.is_not(None))
        .order_by(known.trajectory_id, table.rater)
    )
    said = tuple((await tx.execute(spoken)).tuples().all())
    silent = ~select(table.rater).where(table.trajectory_id == known.trajectory_id).exists()
    others = (
        select(known.features)
        .where(known.tenant == tenant, silent)
        .order_by(known.arrived_ms.desc(), known.trajectory_id)
        .limit(others_max)
    )
    elsewhere = tuple((await tx.execute(others)).scalars())
    return Lesson(tenant, said, elsewhere, until or 0)


async def current(tx: AsyncConnection, tenant: str, source: str) -> str | None:
    """The id of the tenant's reward model."""
    table = reward_models.c
    found: str | None = await tx.scalar(select(table.model_id).where(table.tenant == tenant, table.source == source))
    return found


async def payload(tx: AsyncConnection, tenant: str, source: str) -> bytes:
    table = reward_models.c
    found: bytes | None = await tx.scalar(select(table.payload).where(table.tenant == tenant, table.source == source))
    assert found is not None
    return found


async def keep_model(
    tx: AsyncConnection, now: datetime, source: str, learned: Lesson, model_id: str, made: bytes
) -> bool:
    """Whether it differs from the one before."""
    before = await current(tx, learned.tenant, source)
    row = {
        "model_id": model_id,
        "read_until_ms": learned.read_until_ms,
        "fitted_ms": epoch_ms(now),
        "payload": made,
    }
    await upsert(tx, reward_models, {"tenant": learned.tenant, "source": source}, row)
    return before != model_id


async def mark_for_rescoring(tx: AsyncConnection, tenant: str, most: int) -> None:
    """Have the newest runs of a tenant matched and scored again, some at a time (`store.take_for_rematch`)."""
    known = run_features.c
    newest = (
        select(known.trajectory_id)
        .where(known.tenant == tenant)
        .order_by(known.arrived_ms.desc(), known.trajectory_id)
        .limit(most)
        .subquery()
    )
    theirs = trajectories.c.trajectory_id.in_(select(newest.c.trajectory_id))
    await tx.execute(update(trajectories).where(theirs).values(rematch=True))


async def listed(tx: AsyncConnection, most: int) -> list[Mapping[str, object]]:
    """The reward models, for people to read."""
    query = select(reward_models).order_by(reward_models.c.tenant, reward_models.c.source).limit(most)
    return [dict(row) for row in (await tx.execute(query)).mappings()]
