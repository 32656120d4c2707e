"""`Step`: what one step of practice came to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.practice.runs import Run


@dataclass(frozen=True)
class Step:
    """`number` counts from 1. `version` is what the runs made, with the registry's `decision` about it; None where the
    trainer makes a version of several steps. `champion` is what answers now."""

    number: int
    runs: tuple[Run, ...]
    trained: int
    dropped: Mapping[str, int] = field(default_factory=Counter)
    version: str | None = None
    decision: str | None = None
    champion: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The trainer's own: loss, entropy, gradient and more."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Of the runs that failed, which have no reward."""
        return tuple(run.error for run in self.runs if run.error is not None)

    @property
    def reward_mean(self) -> float | None:
        """Over the runs that have a reward; None: none has."""
        return mean([run.value for run in self.runs if run.value is not None])

    @property
    def run_metrics(self) -> dict[str, float]:
        """The mean of each metric that runs reported, over those that did."""
        names = {name for run in self.runs for name in run.metrics}
        found = {name: mean([run.metrics[name] for run in self.runs if name in run.metrics]) for name in sorted(names)}
        return {name: value for name, value in found.items() if value is not None}


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
