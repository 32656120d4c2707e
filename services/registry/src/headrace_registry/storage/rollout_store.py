"""Functions that read rollouts from the database, as rows and as the state of the state machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction

from sqlalchemy import RowMapping, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.rollouts.findings import ShadowFindings
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.rollouts.state_machine import UNDER_WAY, ModelRolloutState, Phase, Rollout
from headrace_registry.storage.records import AnchorState, ModelRecord
from headrace_registry.storage.tables import ROLLOUTS, VERSIONS
from headrace_runtime.clock import epoch_ms, from_epoch_ms

_HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Row of a rollout.

    `observed_ms` is the rollout's own clock. It advances only while its sessions are read, in any process.
    """

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
    anchor_state: AnchorState
    began: datetime
    changed: datetime
    observed_ms: int
    stage_observed_ms: int
    turns: int
    """Number of the model's turns since the rollout began that the traffic split has assigned."""
    turns_exposed: int
    """Number of these turns that the candidate answered."""
    own_share: Fraction | None
    """Share that an adaptive split has set, if it is below that of the stage; else None."""
    shadow: ShadowFindings
    """Findings of the rollout's shadow; empty before the shadow has ended."""

    @property
    def points(self) -> list[dict[str, object]]:
        """Points of the rollout's chart, parsed from the JSON in `chart`."""
        points: list[dict[str, object]] = json.loads(self.chart)
        return points

    @property
    def is_under_way(self) -> bool:
        return self.phase in UNDER_WAY

    @property
    def share(self) -> Fraction:
        """Share of all units (users or sessions) that the candidate gets while the rollout is in progress."""
        return self.stage_share if self.own_share is None else min(self.own_share, self.stage_share)

    @property
    def stage_share(self) -> Fraction:
        """Share of all units (users or sessions) that the present stage of the plan gives to the candidate."""
        return min(self.plan.stages[self.stage].share, Fraction(1, self.slots + 1))

    @property
    def exposure(self) -> float:
        """Fraction of the model's turns since the rollout began that the candidate answered."""
        return self.turns_exposed / self.turns if self.turns else 0.0

    @property
    def now(self) -> datetime:
        """Present time by the rollout's own clock, which advances only while traffic is read."""
        return self.began + timedelta(milliseconds=self.observed_ms)

    def rollout(self) -> Rollout:
        """Convert the row to the form that `state_machine` uses. Its times are those of the rollout's own clock."""
        changed = self.began + timedelta(milliseconds=self.stage_observed_ms)
        return Rollout(self.version, self.phase, self.stage, self.slot, self.number, self.began, changed)


async def rollouts_under_way(tx: AsyncConnection, model: str | None = None) -> list[RolloutRecord]:
    """Return the rollouts in progress of one model, or of all models for None, oldest first."""
    query = select(ROLLOUTS).where(ROLLOUTS.c.phase.in_(UNDER_WAY)).order_by(ROLLOUTS.c.number_id)
    if model is not None:
        query = query.where(ROLLOUTS.c.model == model)
    return [_record(row) for row in (await tx.execute(query)).mappings()]


async def load_rollout(tx: AsyncConnection, rollout_id: str) -> RolloutRecord | None:
    """Return the rollout with this id, or None."""
    row = (await tx.execute(select(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout_id))).mappings().one_or_none()
    return _record(row) if row else None


async def newest_rollouts(tx: AsyncConnection, model: str | None, limit: int) -> list[RolloutRecord]:
    """Return up to `limit` rollouts of one model, or of all models for None, newest first."""
    query = select(ROLLOUTS).order_by(ROLLOUTS.c.number_id.desc()).limit(limit)
    if model is not None:
        query = query.where(ROLLOUTS.c.model == model)
    return [_record(row) for row in (await tx.execute(query)).mappings()]


async def count_recent_rollouts(tx: AsyncConnection, model: str, now: datetime) -> int:
    """Return the number of the model's rollouts that began within the last hour."""
    query = select(func.count()).where(ROLLOUTS.c.model == model, ROLLOUTS.c.began_ms > epoch_ms(now - _HOUR))
    return (await tx.execute(query)).scalar_one()


async def load_model_state(tx: AsyncConnection, model: ModelRecord) -> ModelRolloutState:
    """Return the state of a model for `state_machine`: the last rollout of each version, and the parents of all
    versions."""
    assert model.champion
    parent_rows = await tx.execute(select(VERSIONS.c.version, VERSIONS.c.parent).where(VERSIONS.c.model == model.model))
    query = select(ROLLOUTS).where(ROLLOUTS.c.model == model.model).order_by(ROLLOUTS.c.number_id)
    rows = (await tx.execute(query)).mappings()
    last_rollouts = {row["version"]: _record(row).rollout() for row in rows}
    return ModelRolloutState(
        model.champion, {row.version: row.parent for row in parent_rows}, last_rollouts, model.family
    )


def _record(row: RowMapping) -> RolloutRecord:
    fields = {name: row[name] for name in ("number_id", "rollout_id", "model", "version", "control", "kind", "salt")}
    fields |= {name: row[name] for name in ("slots", "phase", "stage", "slot", "number", "reason", "chart")}
    return RolloutRecord(
        **fields,
        plan=RolloutPlan.model_validate_json(row["plan"]),
        statistics=json.loads(row["statistics"]),
        anchor_state=AnchorState(**json.loads(row["standing"])),
        began=from_epoch_ms(row["began_ms"]),
        changed=from_epoch_ms(row["changed_ms"]),
        observed_ms=row["observed_ms"],
        stage_observed_ms=row["stage_observed_ms"],
        turns=row["turns"],
        turns_exposed=row["turns_exposed"],
        own_share=Fraction(row["share"]) if row["share"] else None,
        shadow=ShadowFindings.model_validate_json(row["shadow"]),
    )
