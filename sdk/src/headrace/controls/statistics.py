"""Means over seeds and tasks with their standard errors.

Each seed has plays of the same tasks by the base and by every control, with the same seeds of the plays: the difference
on each task counts. Two standard errors can be given for the mean of several seeds. That *over seeds* is the standard
deviation of their means over √seeds: it holds all that differs between seeds, tasks too, but of few seeds it is a rough
estimate and small by luck now and then. That *over tasks* takes the seeds as they are and tasks, clusters of plays, as
drawn. The larger of both is used; one seed has only the second.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Score = tuple[str, float]
"""Of one play: the task, and 0..1."""


@dataclass(frozen=True, slots=True)
class Mean:
    value: float
    over_seeds: float | None
    over_tasks: float
    by_seed: tuple[float, ...]

    @property
    def error(self) -> float:
        return max(self.over_tasks, self.over_seeds or 0.0)

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


def mean(plays: Sequence[Sequence[Score]]) -> Mean:
    """The mean score; one list of plays for each seed."""
    return _over([_by_task(one) for one in plays])


def difference(plays: Sequence[Sequence[Score]], base: Sequence[Sequence[Score]]) -> Mean:
    """How much better than `base` on the same plays. Lists of one seed are in the same order."""
    paired = []
    for ours, theirs in zip(plays, base, strict=True):
        pairs = zip(ours, theirs, strict=True)
        assert [task for task, _ in ours] == [task for task, _ in theirs], "the same tasks in the same order"
        paired.append(_by_task((task, score - other) for (task, score), (_, other) in pairs))
    return _over(paired)


def _by_task(scores: Iterable[Score]) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for task, score in scores:
        found[task].append(score)
    return found


def _over(seeds: Sequence[Mapping[str, list[float]]]) -> Mean:
    means, squares = [], []
    for tasks in seeds:
        count = sum(map(len, tasks.values()))
        middle = math.fsum(value for values in tasks.values() for value in values) / count
        means.append(middle)
        squares.append(_of_clusters([math.fsum(values) - len(values) * middle for values in tasks.values()], count))
    over_seeds = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    over_tasks = math.sqrt(math.fsum(squares)) / len(seeds)
    return Mean(math.fsum(means) / len(means), over_seeds, over_tasks, tuple(means))


def _of_clusters(rests: Sequence[float], plays: int) -> float:
    """Squared standard error of a mean of `plays` in clusters, of whose sums `rests` is what differs from the mean."""
    clusters = len(rests)
    return math.fsum(rest * rest for rest in rests) / plays**2 * clusters / (clusters - 1) if clusters > 1 else 0.25
