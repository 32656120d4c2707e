"""What Prometheus sees of the rollouts that go on. A series goes when its rollout is over."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace_registry.metrics import ROLLOUT_DIFFERENCE, ROLLOUT_EXPOSURE, ROLLOUT_HARM, ROLLOUT_SHARE, Level
from headrace_registry.rollouts.evidence import Findings
from headrace_registry.rollouts.kept import KeptRollout


class RolloutGauges:
    """`show` after each look, `keep` with those that go on."""

    def __init__(self) -> None:
        self._series: dict[str, set[tuple[Level, tuple[str, ...]]]] = {}
        """By rollout."""

    def show(self, rollout: KeptRollout, found: Findings) -> None:
        where = rollout.model, str(rollout.slot)
        self._set(rollout, ROLLOUT_SHARE, where, float(rollout.share))
        self._set(rollout, ROLLOUT_EXPOSURE, where, rollout.exposure)
        for metric in [name.removesuffix(".lower") for name in found.statistics if name.endswith(".lower")]:
            for end in ("difference", "lower", "upper"):
                self._set(rollout, ROLLOUT_DIFFERENCE, (*where, metric, end), found.statistics[f"{metric}.{end}"])
        for guardrail, evidence in evidence_of_harm(rollout, found).items():
            self._set(rollout, ROLLOUT_HARM, (*where, guardrail), evidence)

    def keep(self, model: str, going_on: Iterable[KeptRollout]) -> None:
        """Remove what is said of other rollouts of that model."""
        stay = {one.rollout_id for one in going_on}
        for rollout_id in [name for name in self._series if name not in stay]:
            if any(labels[0] != model for _, labels in self._series[rollout_id]):
                continue
            for gauge, labels in self._series.pop(rollout_id):
                if not any((gauge, labels) in others for others in self._series.values()):
                    gauge.remove(*labels)

    def _set(self, rollout: KeptRollout, gauge: Level, labels: tuple[str, ...], value: float) -> None:
        gauge.labels(*labels).set(value)
        self._series.setdefault(rollout.rollout_id, set()).add((gauge, labels))


def evidence_of_harm(rollout: KeptRollout, found: Findings) -> dict[str, float]:
    """Each guardrail's as a share of what takes the candidate back: the log of the wealth over what its first reading
    on live traffic needs. Below 0 the sessions speak against harm."""
    plan = rollout.plan
    shown = {}
    for guardrail in plan.guardrails:
        wealth = found.statistics.get(f"{guardrail.metric}.harm_log_wealth")
        if wealth is not None:
            shown[guardrail.metric] = wealth / -math.log(plan.harm_error(guardrail, "maturity"))
    return shown
