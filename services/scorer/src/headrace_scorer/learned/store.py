"""Thumbs, features and fitted reward models in the scorer's database. Functions run in their caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.tables import upsert
from headrace_scorer.learned.models import Features, Thumb, ThumbedRun
from headrace_scorer.schema import reward_models, run_features, thumbs, trajectories

_TENANTS_MAX = 256
_RATERS_MAX = 4
"""Mean number of raters of a run, above which thumbs are left out."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Stored thumbs and features from which the reward model of one tenant is fitted."""

    tenant: str
    thumbs: tuple[tuple[str, str, str, float], ...]
    """For each thumb: the trajectory's id, the trajectory's features as JSON, the rater, the value."""
    unrated: tuple[str, ...]
    """Features of runs without thumbs, as JSON."""
    new_thumbs: int
    """Number of thumbs that had changed since the last fit."""

    def rated_runs(self) -> list[ThumbedRun]:
        """Parse the runs with thumbs. Do not call it on an event loop, because the JSON may have some megabytes."""
        by_run: dict[str, tuple[str, list[Thumb]]] = {}
        for trajectory_id, features, rater, value in self.thumbs:
            by_run.setdefault(trajectory_id, (features, []))[1].append(Thumb(rater, value))
        return [ThumbedRun(name, json.loads(features), tuple(rated)) for name, (features, rated) in by_run.items()]

    def unrated_features(self) -> list[Features]:
        """Parse the features of runs without thumbs."""
        return [json.loads(features) for features in self.unrated]


async def store_features(
    tx: AsyncConnection, trajectory_id: str, tenant: str, arrived_ms: int, features: Features
) -> None:
    """Store the features of a run."""
    row = {"tenant": tenant, "features": json.dumps(features, sort_keys=True), "arrived_ms": arrived_ms}
    await upsert(tx, run_features, {"trajectory_id": trajectory_id}, row)


async def store_thumbs(
    tx: AsyncConnection, now: datetime, source: str, trajectory_id: str, tenant: str, values: Mapping[str, float]
) -> None:
    """Store the thumbs (ratings by people) that a run has now, for training the reward model of its tenant.

    Args:
        tx: the transaction.
        now: the present time.
        source: source of the rewards that the reward model gives.
        trajectory_id: id of the run.
        tenant: tenant of the run.
        values: present value by rater. An earlier thumb of a rater who is missing here counts as withdrawn.
    """
    table = thumbs.c
    query = select(table.rater, table.value).where(table.trajectory_id == trajectory_id)
    before: dict[str, float | None] = {row.rater: row.value for row in await tx.execute(query)}
    changed = [rater for rater in sorted({*before, *values}) if before.get(rater) != values.get(rater)]
    for rater in changed:
        row = {"tenant": tenant, "value": values.get(rater), "arrived_ms": epoch_ms(now)}
        await upsert(tx, thumbs, {"trajectory_id": trajectory_id, "rater": rater}, row)
    if changed:
        key = {"tenant": tenant, "source": source}
        await upsert(tx, reward_models, key, {"fresh": 0, "counted": 0}, update=False)
        more = reward_models.c.fresh + len(changed)
        await tx.execute(update(reward_models).where(_of_model(tenant, source)).values(fresh=more))


async def tenants_to_refit(tx: AsyncConnection, source: str, share: float) -> Sequence[str]:
    """Return the tenants whose reward model should be fitted again, because enough thumbs have arrived since the last
    fit.

    Args:
        tx: the transaction.
        source: source of the rewards that the reward models give.
        share: smallest number of new thumbs, as a fraction of the thumbs that the model was fitted to.
    """
    table = reward_models.c
    fresh = (table.source == source) & (table.fresh > 0) & (table.fresh >= share * table.counted)
    query = select(table.tenant).where(fresh).order_by(table.tenant).limit(_TENANTS_MAX)
    return list((await tx.execute(query)).scalars())


async def training_data(
    tx: AsyncConnection, tenant: str, source: str, thumbs_max: int, others_max: int
) -> TrainingData:
    """Load the runs from which the reward model of a tenant is fitted.

    Args:
        tx: the transaction.
        tenant: the tenant.
        source: source of the rewards that the model gives.
        thumbs_max: largest number of runs with thumbs, of which the newest are loaded.
        others_max: largest number of runs without thumbs, of which the newest are loaded.
    """
    table, runs = thumbs.c, run_features.c
    fresh: int | None = await tx.scalar(select(reward_models.c.fresh).where(_of_model(tenant, source)))
    newest = (
        select(table.trajectory_id)
        .where(table.tenant == tenant, table.value.is_not(None))
        .order_by(table.arrived_ms.desc(), table.trajectory_id)
        .limit(thumbs_max)
        .subquery()
    )
    rated = (
        select(runs.trajectory_id, runs.features, table.rater, table.value)
        .join(thumbs, table.trajectory_id == runs.trajectory_id)
        .where(runs.trajectory_id.in_(select(newest.c.trajectory_id)), table.value.is_not(None))
        .order_by(runs.trajectory_id, table.rater)
        .limit(_RATERS_MAX * thumbs_max)
    )
    thumb_rows = tuple((name, features, rater, value) for name, features, rater, value in await tx.execute(rated))
    has_no_thumb = ~select(table.rater).where(table.trajectory_id == runs.trajectory_id).exists()
    unrated = (
        select(runs.features)
        .where(runs.tenant == tenant, has_no_thumb)
        .order_by(runs.arrived_ms.desc(), runs.trajectory_id)
        .limit(others_max)
    )
    return TrainingData(tenant, thumb_rows, tuple((await tx.execute(unrated)).scalars()), fresh or 0)


async def current_model_id(tx: AsyncConnection, tenant: str, source: str) -> str | None:
    """Return the id of the reward model that is fitted for a tenant; None before the first fit.

    Args:
        tx: the transaction.
        tenant: the tenant whose thumbs the model learned from.
        source: name of the model as a source of rewards, `learned:<model>`.
    """
    model_id: str | None = await tx.scalar(select(reward_models.c.model_id).where(_of_model(tenant, source)))
    return model_id


async def model_payload(tx: AsyncConnection, tenant: str, source: str) -> bytes:
    """Return the serialized reward model of a tenant for the rewards of `source`. The model must exist."""
    serialized: bytes | None = await tx.scalar(select(reward_models.c.payload).where(_of_model(tenant, source)))
    assert serialized is not None
    return serialized


async def store_model(
    tx: AsyncConnection, now: datetime, source: str, data: TrainingData, model_id: str, serialized: bytes
) -> bool:
    """Store the reward model that was fitted to `data`, for the rewards of `source`.

    Returns:
        Whether the model differs from the previously stored one.
    """
    before = await current_model_id(tx, data.tenant, source)
    row = {
        "fresh": reward_models.c.fresh - data.new_thumbs,  # more thumbs may have arrived during the fit
        "counted": len(data.thumbs),
        "model_id": model_id,
        "fitted_ms": epoch_ms(now),
        "payload": serialized,
    }
    await tx.execute(update(reward_models).where(_of_model(data.tenant, source)).values(row))
    return before != model_id


async def wait_for_thumbs(tx: AsyncConnection, tenant: str, source: str) -> None:
    """Mark all thumbs of a tenant as used, so that a model whose fit failed is fitted again only after new thumbs."""
    await tx.execute(update(reward_models).where(_of_model(tenant, source)).values(fresh=0))


async def mark_for_rescoring(tx: AsyncConnection, tenant: str, most: int) -> None:
    """Mark the newest `most` trajectories of a tenant for scoring with the tenant's newly fitted reward model.

    `rematches.take` returns them, and the scorer matches them with their feedback again and computes new scores.
    """
    runs = run_features.c
    newest = (
        select(runs.trajectory_id)
        .where(runs.tenant == tenant)
        .order_by(runs.arrived_ms.desc(), runs.trajectory_id)
        .limit(most)
        .subquery()
    )
    is_newest = trajectories.c.trajectory_id.in_(select(newest.c.trajectory_id))
    await tx.execute(update(trajectories).where(is_newest).values(rematch=True))


async def list_models(tx: AsyncConnection, most: int) -> list[Mapping[str, object]]:
    """Return up to `most` fitted reward models as JSON, for the REST interface."""
    fitted = select(reward_models).where(reward_models.c.model_id.is_not(None))
    query = fitted.order_by(reward_models.c.tenant, reward_models.c.source).limit(most)
    return [dict(row) for row in (await tx.execute(query)).mappings()]


def _of_model(tenant: str, source: str) -> ColumnElement[bool]:
    return (reward_models.c.tenant == tenant) & (reward_models.c.source == source)
