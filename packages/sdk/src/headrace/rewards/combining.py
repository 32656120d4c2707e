"""Several rewards as one, and rewards on a common scale."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal


def composite(
    parts: Mapping[str, float | None],
    weights: Mapping[str, float] | None = None,
    *,
    combine: Literal["mean", "sum"] = "mean",
) -> float | None:
    """The weighted mean or sum of the parts that can tell; a part without a weight has 1. None when no part can tell.

    Raises `ValueError` for a weight of a part that there is not: a misspelt one would count as 1.
    """
    weights = weights or {}
    strange = sorted(weights.keys() - parts.keys())
    if strange:
        raise ValueError(f"there is a weight for {strange[0]!r}, which is no part; the parts are {', '.join(parts)}")
    told = [(value, weights.get(name, 1.0)) for name, value in parts.items() if value is not None]
    total = math.fsum(weight for _, weight in told)
    if not total:
        return None
    found = math.fsum(value * weight for value, weight in told)
    return found / total if combine == "mean" else found


def relative(scores: Sequence[float | None]) -> list[float | None]:
    """The scores that a judge gave the runs of one group, as places within it from 0 to 1; equal scores share a place.

    A judge says reliably which of two runs is better, and less reliably by how much. So only the order counts: a judge
    that is generous today, or that pays 0.99 for what pleases it, moves nothing. Fewer than two scores say nothing.
    """
    told = [score for score in scores if score is not None]
    if len(told) < 2:
        return [None] * len(scores)
    return [None if score is None else _place(score, told) for score in scores]


def _place(score: float, told: Sequence[float]) -> float:
    below = sum(other < score for other in told)
    equal = sum(other == score for other in told) - 1
    return (below + equal / 2) / (len(told) - 1)


def standardized(rewards: Sequence[float], *, scale_min: float = 1e-3) -> list[float]:
    """The rewards of one group less their mean, over their standard deviation where that is more than noise."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / max(deviation, scale_min) for reward in rewards]


class TaskScale:
    """Puts the rewards of unlike tasks on one scale: how far a reward lies from the mean of its own task so far.

    Welford's running moments, of the rewards before the one that is asked about. It abstains until it has seen
    `count_min` of a task, and keeps `tasks_max` tasks, those seen last.
    """

    def __init__(self, *, count_min: int = 4, scale_min: float = 0.05, tasks_max: int = 10_000) -> None:
        self._count_min = count_min
        self._scale_min = scale_min
        self._tasks_max = tasks_max
        self._moments: dict[str, tuple[int, float, float]] = {}

    def scaled(self, task_id: str, reward: float) -> float | None:
        """Where the reward lies, in deviations of its task, clipped to [-3, 3]; then it is one of those seen."""
        count, mean, squares = self._moments.pop(task_id, (0, 0.0, 0.0))
        found = None
        if count >= self._count_min:
            deviation = math.sqrt(squares / count)
            found = max(-3.0, min(3.0, (reward - mean) / max(deviation, self._scale_min)))
        moved = mean + (reward - mean) / (count + 1)
        self._moments[task_id] = count + 1, moved, squares + (reward - mean) * (reward - moved)
        if len(self._moments) > self._tasks_max:
            del self._moments[next(iter(self._moments))]
        return found


def by_task(rewards: Sequence[tuple[str, float]], *, scale_min: float = 1e-3) -> list[float]:
    """`standardized` within each task, for a batch that holds several; in the order of `rewards`."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, (task_id, _) in enumerate(rewards):
        places[task_id].append(place)
    found = [0.0] * len(rewards)
    for own in places.values():
        for place, value in zip(own, standardized([rewards[at][1] for at in own], scale_min=scale_min), strict=True):
            found[place] = value
    return found
