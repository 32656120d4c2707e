"""Thumbs, features and fitted reward models in the scorer's database. Functions run in their caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.upsert import upsert
from headrace_scorer.learned.models import Features, Thumb, ThumbedRun
from headrace_scorer.schema import reward_models, run_features, thumbs, trajectories

_TENANTS_MAX = 256
_RATERS_MAX = 4
"""Of a run, in the mean."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a reward model of one tenant is fitted to."""

    tenant: str
    said: tuple[tuple[str, str, str, float], ...]
    """Of each thumb: the trajectory, its features as JSON, the rater, the value."""
    elsewhere: tuple[str, ...]
    """Features of runs that nobody spoke of."""
    fresh: int
    """How many thumbs were new when it was read."""

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
    tx: AsyncConnection, now: datetime, source: str, trajectory_id: str, tenant: str, said: Mapping[str, float]
) -> None:
    """What each rater says now. Who said something before and is not among them has taken it back."""
    table = thumbs.c
    query = select(table.rater, table.value).where(table.trajectory_id == trajectory_id)
    before: dict[str, float | None] = {row.rater: row.value for row in await tx.execute(query)}
    changed = [rater for rater in sorted({*before, *said}) if before.get(rater) != said.get(rater)]
    for rater in changed:
        row = {"tenant": tenant, "value": said.get(rater), "arrived_ms": epoch_ms(now)}
        await upsert(tx, thumbs, {"trajectory_id": trajectory_id, "rater": rater}, row)
    if changed:
        key = {"tenant": tenant, "source": source}
        await upsert(tx, reward_models, key, {"fresh": 0, "counted": 0}, update=False)
        more = reward_models.c.fresh + len(changed)
        await tx.execute(update(reward_models).where(_own(tenant, source)).values(fresh=more))


async def due(tx: AsyncConnection, source: str, share: float) -> Sequence[str]:
    """Tenants of whose thumbs at least `share` of what their reward model knows, and at least one, are new to it."""
    table = reward_models.c
    fresh = (table.source == source) & (table.fresh > 0) & (table.fresh >= share * table.counted)
    query = select(table.tenant).where(fresh).order_by(table.tenant).limit(_TENANTS_MAX)
    return list((await tx.execute(query)).scalars())


async def lesson(tx: AsyncConnection, tenant: str, source: str, thumbs_max: int, others_max: int) -> Lesson:
    """The newest runs with thumbs, and the newest without."""
    table, known = thumbs.c, run_features.c
    fresh: int | None = await tx.scalar(select(reward_models.c.fresh).where(_own(tenant, source)))
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
        .limit(_RATERS_MAX * thumbs_max)
    )
    said = tuple((name, features, rater, value) for name, features, rater, value in await tx.execute(spoken))
    silent = ~select(table.rater).where(table.trajectory_id == known.trajectory_id).exists()
    others = (
        select(known.features)
        .where(known.tenant == tenant, silent)
        .order_by(known.arrived_ms.desc(), known.trajectory_id)
        .limit(others_max)
    )
    elsewhere = tuple((await tx.execute(others)).scalars())
    return Lesson(tenant, said, elsewhere, fresh or 0)


async def current(tx: AsyncConnection, tenant: str, source: str) -> str | None:
    """The id of the tenant's reward model; None before the first fit."""
    found: str | None = await tx.scalar(select(reward_models.c.model_id).where(_own(tenant, source)))
    return found


async def payload(tx: AsyncConnection, tenant: str, source: str) -> bytes:
    found: bytes | None = await tx.scalar(select(reward_models.c.payload).where(_own(tenant, source)))
    assert found is not None
    return found


async def keep_model(
    tx: AsyncConnection, now: datetime, source: str, learned: Lesson, model_id: str, made: bytes
) -> bool:
    """Whether it differs from the one before."""
    before = await current(tx, learned.tenant, source)
    row = {
        "fresh": reward_models.c.fresh - learned.fresh,  # some may have come since
        "counted": len(learned.said),
        "model_id": model_id,
        "fitted_ms": epoch_ms(now),
        "payload": made,
    }
    await tx.execute(update(reward_models).where(_own(learned.tenant, source)).values(row))
    return before != model_id


async def wait_for_thumbs(tx: AsyncConnection, tenant: str, source: str) -> None:
    """Have a model that could not be fitted wait for new thumbs, instead of failing again at every look."""
    await tx.execute(update(reward_models).where(_own(tenant, source)).values(fresh=0))


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
    fitted = select(reward_models).where(reward_models.c.model_id.is_not(None))
    query = fitted.order_by(reward_models.c.tenant, reward_models.c.source).limit(most)
    return [dict(row) for row in (await tx.execute(query)).mappings()]


def _own(tenant: str, source: str) -> ColumnElement[bool]:
    return (reward_models.c.tenant == tenant) & (reward_models.c.source == source)
