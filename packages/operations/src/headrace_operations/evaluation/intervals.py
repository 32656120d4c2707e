"""Confidence intervals of 95 % for metrics of tasks. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from headrace_statistics.intervals import wilson

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Measurement:
    """Mean of a metric with its confidence interval. `count` is the number of values, `tasks` that of their tasks."""

    mean: float
    low: float
    high: float
    count: int
    tasks: int
    interval: str


def bootstrap(by_task: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean (Efron 1979).

    Tasks are resampled, each with all of its plays, because plays of one task are correlated: resampling single plays
    would make the interval too narrow.
    """
    generator = random.Random(f"bootstrap {seed}")
    means = []
    for _ in range(RESAMPLES):
        sample = generator.choices(by_task, k=len(by_task))
        means.append(sum(map(sum, sample)) / sum(map(len, sample)))
    means.sort()
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]


def measure(by_task: Sequence[Sequence[float]], seed: int) -> Measurement:
    """Measure a metric: with Wilson's interval for binary values of tasks that were played once, else by bootstrap."""
    values = [value for plays in by_task for value in plays]
    single = all(len(plays) == 1 for plays in by_task)
    if single and all(value in (0.0, 1.0) for value in values):
        low, high = wilson(round(sum(values)), len(values))
        return Measurement(fmean(values), low, high, len(values), len(by_task), "wilson")
    low, high = bootstrap(by_task, seed)
    return Measurement(fmean(values), low, high, len(values), len(by_task), "bootstrap")
