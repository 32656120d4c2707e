"""Intervals of 95 % for what was measured on tasks. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from headrace_statistics.intervals import wilson

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Measurement:
    """A mean with its interval. `count`: values; `tasks`: tasks that they are of."""

    mean: float
    low: float
    high: float
    count: int
    tasks: int
    interval: str


def bootstrap(by_task: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """The percentile interval of the mean (Efron 1979). Tasks are drawn, each with all of its plays: plays of one task
    are alike, and drawing them singly would make the interval too narrow."""
    draw = random.Random(f"bootstrap {seed}")
    means = []
    for _ in range(RESAMPLES):
        drawn = draw.choices(by_task, k=len(by_task))
        means.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    means.sort()
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]


def measured(by_task: Sequence[Sequence[float]], seed: int) -> Measurement:
    """Wilson's interval where each task was played once and the values are 0 or 1, else the bootstrap's."""
    values = [value for plays in by_task for value in plays]
    single = all(len(plays) == 1 for plays in by_task)
    if single and all(value in (0.0, 1.0) for value in values):
        low, high = wilson(round(sum(values)), len(values))
        return Measurement(fmean(values), low, high, len(values), len(by_task), "wilson")
    low, high = bootstrap(by_task, seed)
    return Measurement(fmean(values), low, high, len(values), len(by_task), "bootstrap")
