"""Means over seeds and tasks with their standard errors.

Whatever is compared has played the same tasks with the same seeds of the plays, so the difference on each play counts.
The error *over seeds* is the standard deviation of the seeds' means over √seeds. The error *over tasks* takes the seeds
as they are and tasks, clusters of plays, as drawn at random.

- Seeds with tasks of their own: the first holds all that differs between seeds, tasks too, but of few seeds it is a
  rough estimate and too small by luck now and then. The larger of both counts.
- Seeds that share their tasks: the first knows nothing of tasks and the second nothing of seeds. Their squares add up.

One seed has only the second.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

Score = tuple[str, float]
"""Of one play: the task, and 0..1."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Of scores or of differences, with its standard error."""

    value: float
    error: float
    over_seeds: float | None
    over_tasks: float
    by_seed: tuple[float, ...]

    def within(self, errors: float = 2.0) -> bool:
        """Whether it is 0 as far as one can see."""
        return abs(self.value) <= errors * self.error

    def report(self) -> dict[str, object]:
        return {
            "mean": round(self.value, 4),
            "standard_error": round(self.error, 4),
            "over_seeds": None if self.over_seeds is None else round(self.over_seeds, 4),
            "over_tasks": round(self.over_tasks, 4),
            "by_seed": [round(one, 4) for one in self.by_seed],
        }


def mean(plays: Sequence[Sequence[Score]], *, shared: bool = False) -> Mean:
    """The mean score; one list of plays for each seed. `shared`: all seeds have the same tasks."""
    return _over(plays, shared)


def difference(plays: Sequence[Sequence[Score]], base: Sequence[Sequence[Score]], *, shared: bool = False) -> Mean:
    """How much better than `base` on the same plays; lists of one seed are in the same order."""
    paired = []
    for ours, theirs in zip(plays, base, strict=True):
        pairs = list(zip(ours, theirs, strict=True))
        assert all(one[0] == other[0] for one, other in pairs), "the same tasks in the same order"
        paired.append([(task, score - other) for (task, score), (_, other) in pairs])
    return _over(paired, shared)


def _over(seeds: Sequence[Sequence[Score]], shared: bool) -> Mean:
    means = [math.fsum(value for _, value in plays) / len(plays) for plays in seeds]
    over_seeds = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    if shared:
        over_tasks = _over_tasks([play for plays in seeds for play in plays])
        error = math.hypot(over_tasks, over_seeds or 0.0)
    else:
        over_tasks = math.sqrt(math.fsum(_over_tasks(plays) ** 2 for plays in seeds)) / len(seeds)
        error = max(over_tasks, over_seeds or 0.0)
    return Mean(math.fsum(means) / len(means), error, over_seeds, over_tasks, tuple(means))


def _over_tasks(plays: Sequence[Score]) -> float:
    """Standard error of the mean when tasks are drawn and each brings all its plays (a cluster).

    No less than that of independent plays. One task says nothing: half the range of scores.
    """
    middle = math.fsum(value for _, value in plays) / len(plays)
    rests: dict[str, float] = defaultdict(float)
    for task, value in plays:
        rests[task] += value - middle
    clusters = len(rests)
    if clusters < 2:
        return 0.5
    clustered = math.fsum(rest * rest for rest in rests.values()) * clusters / (clusters - 1) / len(plays) ** 2
    alone = math.fsum((value - middle) ** 2 for _, value in plays) / (len(plays) - 1) / len(plays)
    return math.sqrt(max(clustered, alone))  # the sums of few tasks agree by luck now and then
