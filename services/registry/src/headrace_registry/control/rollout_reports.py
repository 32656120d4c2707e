"""Reports about rollouts: their state for the REST interface, charts of their steps, and Prometheus gauges.

The charts are files in the data directory. The series of a rollout's gauges are removed when the rollout has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from pathlib import Path

from headrace_registry.metrics import ROLLOUT_DIFFERENCE, ROLLOUT_EXPOSURE, ROLLOUT_HARM, ROLLOUT_SHARE, Level
from headrace_registry.rollouts import metrics as rollout_metrics
from headrace_registry.rollouts.evidence import Findings
from headrace_registry.rollouts.plan import Guardrail, Success
from headrace_registry.rollouts.state_machine import LEFT_TO_OPERATOR
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_runtime import rollout_picture
from headrace_runtime.process.logs import get_logger
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import ChartPoint, RolloutState

log = get_logger(__name__)


class ReportWriter:
    """Writer of charts of rollouts as PNG files. Call `write` after each step; if the step already has a chart, nothing
    is written.

    A chart contains only data of the database, so `headrace rollouts report` can draw it again at any time. If
    matplotlib is missing or the disk is full, only the chart is not written.
    """

    def __init__(self, folder: Path, kept_max: int) -> None:
        self._folder = folder
        self._kept_max = kept_max
        self._without_matplotlib = False

    async def write(self, state: RolloutState) -> None:
        """Draw a chart of the rollout after its last step, unless the file exists."""
        path = self._folder / name_of(state)
        if not self._kept_max or self._without_matplotlib or await asyncio.to_thread(path.exists):
            return
        try:
            drawn = await asyncio.to_thread(self._draw, state, path)
        except OSError as error:
            log.warning("report_left_out", path=str(path), error=repr(error), remedy="headrace rollouts report")
            return
        if not drawn:
            self._without_matplotlib = True
            log.info("reports_left_out", reason="matplotlib is not installed", remedy="headrace rollouts report")

    def _draw(self, state: RolloutState, path: Path) -> bool:
        drawn = rollout_picture.picture(state, rollout_picture.metric_of(state), path)
        for path_to_remove in sorted(self._folder.glob("*.png"))[: -self._kept_max]:  # names begin with the time
            path_to_remove.unlink(missing_ok=True)
        return drawn


def name_of(state: RolloutState) -> str:
    """Return the file name of the chart for the rollout's last step. It consists of time, version, number and kind of
    the step."""
    steps = [event for event in state.decisions if event.rollout is not None]
    last = steps[-1] if steps else None
    at = last.time if last else state.began_at
    kind = last.rollout.kind if last and last.rollout else "begin"
    return f"{at:%Y%m%dT%H%M%S}-{state.version.replace('@', '-')}-{len(steps):03}-{kind}.png"


class RolloutGauges:
    """Prometheus gauges of the rollouts of all models.

    Call `show` after each evaluation of a rollout, and `remove_ended` with the rollouts that are still in progress.
    """

    def __init__(self) -> None:
        self._series: dict[str, set[tuple[Level, tuple[str, ...]]]] = {}
        """Gauges and their labels by rollout id."""

    def show(self, rollout: RolloutRecord, findings: Findings) -> None:
        labels = rollout.model, str(rollout.slot)
        self._set(rollout, ROLLOUT_SHARE, labels, float(rollout.share))
        self._set(rollout, ROLLOUT_EXPOSURE, labels, rollout.exposure)
        for metric in [name.removesuffix(".lower") for name in findings.statistics if name.endswith(".lower")]:
            for end in ("difference", "lower", "upper"):
                self._set(rollout, ROLLOUT_DIFFERENCE, (*labels, metric, end), findings.statistics[f"{metric}.{end}"])
        for guardrail, evidence in evidence_of_harm(rollout, findings).items():
            self._set(rollout, ROLLOUT_HARM, (*labels, guardrail), evidence)

    def remove_ended(self, model: str, rollouts: Iterable[RolloutRecord]) -> None:
        """Remove the series of all rollouts of a model except those in `rollouts`."""
        kept_ids = {rollout.rollout_id for rollout in rollouts}
        for rollout_id in [name for name in self._series if name not in kept_ids]:
            if any(labels[0] != model for _, labels in self._series[rollout_id]):
                continue
            for gauge, labels in self._series.pop(rollout_id):
                if not any((gauge, labels) in remaining for remaining in self._series.values()):
                    gauge.remove(*labels)

    def _set(self, rollout: RolloutRecord, gauge: Level, labels: tuple[str, ...], value: float) -> None:
        gauge.labels(*labels).set(value)
        self._series.setdefault(rollout.rollout_id, set()).add((gauge, labels))


def evidence_of_harm(rollout: RolloutRecord, findings: Findings) -> dict[str, float]:
    """Return the evidence of harm for each guardrail, relative to the evidence that rolls the candidate back: 1 means a
    rollback.

    The evidence is the log wealth of the guardrail's e-process. It is divided by the log wealth at which the first
    reading on live traffic rolls the candidate back. A negative value is evidence against harm.
    """
    plan = rollout.plan
    shares = {}
    for guardrail in plan.guardrails:
        wealth = findings.statistics.get(f"{guardrail.metric}.harm_log_wealth")
        if wealth is not None:
            shares[guardrail.metric] = wealth / -math.log(plan.harm_error(guardrail, "maturity"))
    return shares


def rollout_state(
    rollout: RolloutRecord, decisions: tuple[ModelEvent, ...] = (), *, chart: bool = False
) -> RolloutState:
    """Return the state of a rollout for the REST interface. `decisions` are its steps. With `chart` the points of its
    chart are included."""
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
        higher_is_better={name: rollout_metrics.metric_named(name).higher_is_better for name in sorted(metric_names)},
        statistics=dict(rollout.statistics),
        shadow_units=rollout.plan.shadow_units,
        shadow=rollout.shadow.state,
        chart=tuple(ChartPoint.model_validate(point) for point in rollout.points) if chart else (),
        began_at=rollout.began,
        changed_at=rollout.changed,
        watched_s=rollout.observed_ms / 1000,
        decisions=decisions,
    )
