"""Means over seeds and tasks with their standard errors.

Compared versions have played the same tasks with the same seeds, so the differences of single plays are averaged. The
error *over seeds* is the standard deviation of the means of the seeds divided by √seeds. The error *over tasks* treats
the seeds as fixed and the tasks, which are clusters of plays, as drawn at random.

- If each seed has its own tasks, the error over seeds includes the variation of tasks, but with few seeds it is a rough
  estimate and sometimes too small. The larger of both errors is used.
- If the seeds share their tasks, the error over seeds does not include tasks, and the error over tasks does not include
  seeds. The squares of both are added.

With one seed only the error over tasks is available.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

Score = tuple[str, float]
"""Task and score (0..1) of one play."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of scores or of differences, with its standard error."""

    value: float
    error: float
    over_seeds: float | None
    """Standard error over seeds; None for one seed."""
    over_tasks: float
    """Standard error over tasks."""
    by_seed: tuple[float, ...]
    """Mean of each seed."""

    def within(self, errors: float = 2.0) -> bool:
        """Return whether the mean is at most `errors` standard errors from 0."""
        return abs(self.value) <= errors * self.error

    def report(self) -> dict[str, object]:
        return {
            "mean": round(self.value, 4),
            "standard_error": round(self.error, 4),
            "over_seeds": None if self.over_seeds is None else round(self.over_seeds, 4),
            "over_tasks": round(self.over_tasks, 4),
            "by_seed": [round(value, 4) for value in self.by_seed],
        }


def mean(plays: Sequence[Sequence[Score]], *, shared: bool = False) -> Mean:
    """Return the mean score of the plays, one list for each seed. `shared`: all seeds have the same tasks."""
    return _over(plays, shared)


def difference(plays: Sequence[Sequence[Score]], base: Sequence[Sequence[Score]], *, shared: bool = False) -> Mean:
    """Return the mean difference from `base` on the same plays; the lists of a seed must have the same order."""
    paired = []
    for run, base_plays in zip(plays, base, strict=True):
        pairs = list(zip(run, base_plays, strict=True))
        assert all(play[0] == base_play[0] for play, base_play in pairs), "the same tasks in the same order"
        paired.append([(task, score - base_score) for (task, score), (_, base_score) in pairs])
    return _over(paired, shared)


def certainty_above(gain: Mean, reference: Mean, share: float) -> float:
    """Return the probability that `gain` is more than `share` of `reference`. A negative `reference` counts as 0.

    Both means count as normal and independent. Gains over the same base are correlated positively, so the certainty
    of a real excess is rather too low.
    """
    excess = gain.value - share * max(reference.value, 0.0)
    error = math.hypot(gain.error, share * reference.error)
    return statistics.NormalDist().cdf(excess / error) if error else float(excess > 0)


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
    """Return the standard error of the mean if tasks are drawn at random with all their plays (clusters).

    It is at least that of independent plays. With a single task it is half the range of scores.
    """
    mean_score = math.fsum(value for _, value in plays) / len(plays)
    residuals: dict[str, float] = defaultdict(float)
    for task, value in plays:
        residuals[task] += value - mean_score
    clusters = len(residuals)
    if clusters < 2:
        return 0.5
    clustered = math.fsum(rest * rest for rest in residuals.values()) * clusters / (clusters - 1) / len(plays) ** 2
    alone = math.fsum((value - mean_score) ** 2 for _, value in plays) / (len(plays) - 1) / len(plays)
    return math.sqrt(max(clustered, alone))  # with few tasks the cluster estimate can be too small by chance
