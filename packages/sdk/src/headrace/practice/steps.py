"""`Step`: the result of one training step on tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.practice.runs import Run


@dataclass(frozen=True)
class Step:
    """Result of one training step.

    Attributes:
        number: number of the step, from 1.
        trained: number of trained experiences.
        dropped: counts of dropped experiences by reason.
        version: version that was trained on the runs, or None if the trainer makes a version after several steps.
        decision: the registry's decision about `version`.
        champion: version that serves after the step.
    """

    number: int
    runs: tuple[Run, ...]
    trained: int
    dropped: Mapping[str, int] = field(default_factory=Counter)
    version: str | None = None
    decision: str | None = None
    champion: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the trainer: loss, entropy, gradient norm and others."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors of the runs that failed and have no reward."""
        return tuple(run.error for run in self.runs if run.error is not None)

    @property
    def reward_mean(self) -> float | None:
        """Mean over the runs that have a reward, or None if there are none."""
        return mean([run.value for run in self.runs if run.value is not None])

    @property
    def run_metrics(self) -> dict[str, float]:
        """Mean of each metric over the runs that reported it."""
        names = {name for run in self.runs for name in run.metrics}
        means = {name: mean([run.metrics[name] for run in self.runs if name in run.metrics]) for name in sorted(names)}
        return {name: value for name, value in means.items() if value is not None}


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
