"""Rollouts in the form of the REST interface."""

from __future__ import annotations

from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.plan import Guardrail, Success
from headrace_registry.rollouts.rollout_store import RolloutRecord
from headrace_registry.rollouts.state_machine import LEFT_TO_OPERATOR
from headrace_schemas import ModelEvent
from headrace_schemas.http.rollout_api import ChartPoint, RolloutState


def rollout_state(
    rollout: RolloutRecord, decisions: tuple[ModelEvent, ...] = (), *, chart: bool = False
) -> RolloutState:
    """Return the state of a rollout. `decisions` are its steps; `chart` includes the points of the chart."""
    rules: tuple[Guardrail | Success, ...] = (*rollout.plan.guardrails, *rollout.plan.successes)
    metric_names = {*rollout.plan.watched, *(rule.metric for rule in rules)}
    return RolloutState(
        id=rollout.rollout_id,
        model=rollout.model,
        version=rollout.version,
        control=rollout.control,
        kind=rollout.kind,
        phase=rollout.phase,
        stage=rollout.stage,
        stages=tuple(str(stage.share) for stage in rollout.plan.stages),
        share=str(rollout.share) if rollout.is_under_way else "0",
        unit=rollout.plan.unit,
        number=rollout.number,
        reason=rollout.reason,
        good_enough=rollout.phase in ("champion", "succeeded") or rollout.reason.endswith(LEFT_TO_OPERATOR),
        margins={guardrail.metric: guardrail.margin for guardrail in rollout.plan.guardrails},
        higher_is_better={name: metrics.metric_named(name).higher_is_better for name in sorted(metric_names)},
        statistics=dict(rollout.statistics),
        shadow_units=rollout.plan.shadow_units,
        shadow=rollout.shadow.state,
        chart=tuple(ChartPoint.model_validate(point) for point in rollout.points) if chart else (),
        began_at=rollout.began,
        changed_at=rollout.changed,
        watched_s=rollout.observed_ms / 1000,
        decisions=decisions,
    )
