"""Rollouts as the REST interface shows them."""

from __future__ import annotations

from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.machine import LEFT_TO_OPERATOR
from headrace_registry.rollouts.plan import Guardrail, Success
from headrace_schemas import ModelEvent
from headrace_schemas.rollout_api import ChartPoint, RolloutState


def of(one: KeptRollout, decided: tuple[ModelEvent, ...] = (), *, chart: bool = False) -> RolloutState:
    declared: tuple[Guardrail | Success, ...] = (*one.plan.guardrails, *one.plan.successes)
    watched = {*one.plan.watched, *(each.metric for each in declared)}
    return RolloutState(
        id=one.rollout_id,
        model=one.model,
        version=one.version,
        control=one.control,
        kind=one.kind,
        phase=one.phase,
        stage=one.stage,
        stages=tuple(str(stage.share) for stage in one.plan.stages),
        share=str(one.share) if one.going_on else "0",
        unit=one.plan.unit,
        number=one.number,
        reason=one.reason,
        good_enough=one.phase in ("champion", "succeeded") or one.reason.endswith(LEFT_TO_OPERATOR),
        margins={guardrail.metric: guardrail.margin for guardrail in one.plan.guardrails},
        higher_is_better={name: metrics.named(name).higher_is_better for name in sorted(watched)},
        statistics=dict(one.statistics),
        shadow_units=one.plan.shadow_units,
        shadow=one.shadow.state,
        chart=tuple(ChartPoint.model_validate(point) for point in one.points) if chart else (),
        began_at=one.began,
        changed_at=one.changed,
        watched_s=one.observed_ms / 1000,
        decisions=decided,
    )
