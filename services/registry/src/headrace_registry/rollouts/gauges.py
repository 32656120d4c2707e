"""Prometheus gauges of the rollouts under way. A series is removed when its rollout is over."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace_registry.metrics import ROLLOUT_DIFFERENCE, ROLLOUT_EXPOSURE, ROLLOUT_HARM, ROLLOUT_SHARE, Level
from headrace_registry.rollouts.evidence import Findings
from headrace_registry.rollouts.rollout_store import RolloutRecord


class RolloutGauges:
    """Gauges of all models. Call `show` after each evaluation, and `remove_ended` with the rollouts that are still
    under way."""

    def __init__(self) -> None:
        self._series: dict[str, set[tuple[Level, tuple[str, ...]]]] = {}
        """By rollout."""

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
        """Remove the series of that model's rollouts that are not in `rollouts`."""
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
    """Return the evidence of harm of each guardrail, relative to the evidence that rolls the candidate back.

    The value is the log of the wealth over the value that its first reading on live traffic needs. Below 0, the
    sessions are evidence against harm.
    """
    plan = rollout.plan
    shares = {}
    for guardrail in plan.guardrails:
        wealth = findings.statistics.get(f"{guardrail.metric}.harm_log_wealth")
        if wealth is not None:
            shares[guardrail.metric] = wealth / -math.log(plan.harm_error(guardrail, "maturity"))
    return shares
