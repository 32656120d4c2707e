"""Rollouts as the database keeps them, and the machine's book made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction

from sqlalchemy import RowMapping, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.records import ModelRecord, Standing
from headrace_registry.rollout_tables import ROLLOUTS
from headrace_registry.rollouts.machine import UNDER_WAY, Book, Phase, Rollout
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.shadow.findings import ShadowFindings
from headrace_registry.tables import VERSIONS
from headrace_runtime.clock import epoch_ms, from_epoch_ms

_HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class KeptRollout:
    """One row. `observed_ms` is the rollout's own clock: it runs while its sessions are read, whoever reads them."""

    number_id: int
    rollout_id: str
    model: str
    version: str
    control: str
    kind: str
    plan: RolloutPlan
    salt: str
    slots: int
    phase: Phase
    stage: int
    slot: int
    number: int
    reason: str
    statistics: Mapping[str, float]
    chart: str
    standing: Standing
    began: datetime
    changed: datetime
    observed_ms: int
    stage_observed_ms: int
    turns: int
    """Of the model, drawn by the split since the rollout began."""
    turns_exposed: int
    """Those that the candidate answered."""
    own_share: Fraction | None
    """Where an adaptive split gives it less than its stage has."""
    shadow: ShadowFindings
    """Of its shadow, once that is over."""

    @property
    def points(self) -> list[dict[str, object]]:
        """Of the chart."""
        found: list[dict[str, object]] = json.loads(self.chart)
        return found

    @property
    def going_on(self) -> bool:
        return self.phase in UNDER_WAY

    @property
    def share(self) -> Fraction:
        """Of all units, for the candidate, while it goes on."""
        return self.stage_share if self.own_share is None else min(self.own_share, self.stage_share)

    @property
    def stage_share(self) -> Fraction:
        """What its stage would give it."""
        return min(self.plan.stages[self.stage].share, Fraction(1, self.slots + 1))

    @property
    def exposure(self) -> float:
        """Share of the traffic since it began that met the candidate."""
        return self.turns_exposed / self.turns if self.turns else 0.0

    @property
    def now(self) -> datetime:
        """By its own clock, which began when it did."""
        return self.began + timedelta(milliseconds=self.observed_ms)

    def rollout(self) -> Rollout:
        """As the machine knows it, on the rollout's own clock."""
        changed = self.began + timedelta(milliseconds=self.stage_observed_ms)
        return Rollout(self.version, self.phase, self.stage, self.slot, self.number, self.began, changed)


async def under_way(tx: AsyncConnection, model: str | None = None) -> list[KeptRollout]:
    """The oldest first."""
    query = select(ROLLOUTS).where(ROLLOUTS.c.phase.in_(UNDER_WAY)).order_by(ROLLOUTS.c.number_id)
    if model is not None:
        query = query.where(ROLLOUTS.c.model == model)
    return [_kept(row) for row in (await tx.execute(query)).mappings()]


async def one(tx: AsyncConnection, rollout_id: str) -> KeptRollout | None:
    row = (await tx.execute(select(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout_id))).mappings().one_or_none()
    return _kept(row) if row else None


async def newest(tx: AsyncConnection, model: str | None, limit: int) -> list[KeptRollout]:
    query = select(ROLLOUTS).order_by(ROLLOUTS.c.number_id.desc()).limit(limit)
    if model is not None:
        query = query.where(ROLLOUTS.c.model == model)
    return [_kept(row) for row in (await tx.execute(query)).mappings()]


async def begun_lately(tx: AsyncConnection, model: str, now: datetime) -> int:
    """Rollouts of the last hour."""
    query = select(func.count()).where(ROLLOUTS.c.model == model, ROLLOUTS.c.began_ms > epoch_ms(now - _HOUR))
    return (await tx.execute(query)).scalar_one()


async def book(tx: AsyncConnection, model: ModelRecord) -> Book:
    """What the machine decides by: the last rollout of each version, and who descends from whom."""
    assert model.champion
    lines = await tx.execute(select(VERSIONS.c.version, VERSIONS.c.parent).where(VERSIONS.c.model == model.model))
    query = select(ROLLOUTS).where(ROLLOUTS.c.model == model.model).order_by(ROLLOUTS.c.number_id)
    rows = (await tx.execute(query)).mappings()
    last = {row["version"]: _kept(row).rollout() for row in rows}
    return Book(model.champion, {row.version: row.parent for row in lines}, last, model.family)


def _kept(row: RowMapping) -> KeptRollout:
    fields = {name: row[name] for name in ("number_id", "rollout_id", "model", "version", "control", "kind", "salt")}
    fields |= {name: row[name] for name in ("slots", "phase", "stage", "slot", "number", "reason", "chart")}
    return KeptRollout(
        **fields,
        plan=RolloutPlan.model_validate_json(row["plan"]),
        statistics=json.loads(row["statistics"]),
        standing=Standing(**json.loads(row["standing"])),
        began=from_epoch_ms(row["began_ms"]),
        changed=from_epoch_ms(row["changed_ms"]),
        observed_ms=row["observed_ms"],
        stage_observed_ms=row["stage_observed_ms"],
        turns=row["turns"],
        turns_exposed=row["turns_exposed"],
        own_share=Fraction(row["share"]) if row["share"] else None,
        shadow=ShadowFindings.model_validate_json(row["shadow"]),
    )
