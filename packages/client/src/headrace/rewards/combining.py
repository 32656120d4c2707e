"""Functions that combine several rewards into one, put rewards on a common scale, and calibrate a cheap score against
feedback.

The calibration is an isotonic regression: R. Barlow et al., Statistical Inference under Order Restrictions (1972), pool
adjacent violators. The interval is that of E. B. Wilson (1927) for the pooled values. For values strictly between 0 and
1 it is too wide rather than too narrow.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import NormalDist
from typing import Literal


def composite(
    parts: Mapping[str, float | None],
    weights: Mapping[str, float] | None = None,
    *,
    combine: Literal["mean", "sum"] = "mean",
) -> float | None:
    """Return the weighted mean or sum of the parts that have a value, or None if no part has one.

    A part without a weight has weight 1.

    Raises:
        ValueError: a weight names no part. A misspelt name would otherwise get weight 1.
    """
    weights = weights or {}
    unknown_names = sorted(weights.keys() - parts.keys())
    if unknown_names:
        raise ValueError(f"weights: {unknown_names[0]!r} is not a part; the parts are {', '.join(parts)}")
    weighted_values = [(value, weights.get(name, 1.0)) for name, value in parts.items() if value is not None]
    total = math.fsum(weight for _, weight in weighted_values)
    if not total:
        return None
    weighted_sum = math.fsum(value * weight for value, weight in weighted_values)
    return weighted_sum / total if combine == "mean" else weighted_sum


def relative(scores: Sequence[float | None]) -> list[float | None]:
    """Convert the scores that a judge gave to the runs of one group to ranks from 0 to 1. Equal scores get the same
    rank.

    A judge orders two runs more reliably than it measures how far they are apart. With ranks, neither a generous judge
    nor an inflated score changes the result. If fewer than two runs have a score, all results are None.
    """
    scores_given = [score for score in scores if score is not None]
    if len(scores_given) < 2:
        return [None] * len(scores)
    return [None if score is None else _rank(score, scores_given) for score in scores]


def _rank(score: float, scores: Sequence[float]) -> float:
    below = sum(other < score for other in scores)
    equal = sum(other == score for other in scores) - 1
    return (below + equal / 2) / (len(scores) - 1)


def standardized(rewards: Sequence[float], *, scale_min: float = 1e-3) -> list[float]:
    """Return the rewards of one group minus their mean, divided by their standard deviation or at least by
    `scale_min`."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / max(deviation, scale_min) for reward in rewards]


class TaskScale:
    """Running mean and standard deviation of rewards per task, by which rewards of different tasks become comparable.

    They are computed from the earlier rewards of a task with Welford's algorithm. `scaled` returns None before a task
    has `count_min` rewards. If there are more than `tasks_max` tasks, the least recently used are forgotten.
    """

    def __init__(self, *, count_min: int = 4, scale_min: float = 0.05, tasks_max: int = 10_000) -> None:
        self._count_min = count_min
        self._scale_min = scale_min
        self._tasks_max = tasks_max
        self._moments: dict[str, tuple[int, float, float]] = {}

    def scaled(self, task_id: str, reward: float) -> float | None:
        """Return the distance of `reward` from the mean of its task's earlier rewards, in standard deviations and
        clipped to [-3, 3], or None if there are too few. Then add the reward."""
        count, mean, squares = self._moments.pop(task_id, (0, 0.0, 0.0))
        scaled = None
        if count >= self._count_min:
            deviation = math.sqrt(squares / count)
            scaled = max(-3.0, min(3.0, (reward - mean) / max(deviation, self._scale_min)))
        new_mean = mean + (reward - mean) / (count + 1)
        self._moments[task_id] = count + 1, new_mean, squares + (reward - mean) * (reward - new_mean)
        if len(self._moments) > self._tasks_max:
            del self._moments[next(iter(self._moments))]
        return scaled


def by_task(rewards: Sequence[tuple[str, float]], *, scale_min: float = 1e-3) -> list[float]:
    """Standardize rewards within each task (see `standardized`), so that easy and hard tasks become comparable. The
    result has the order of `rewards`, pairs of task id and reward.
    """
    indices: dict[str, list[int]] = defaultdict(list)
    for index, (task_id, _) in enumerate(rewards):
        indices[task_id].append(index)
    scaled = [0.0] * len(rewards)
    for group in indices.values():
        for index, value in zip(
            group, standardized([rewards[member][1] for member in group], scale_min=scale_min), strict=True
        ):
            scaled[index] = value
    return scaled


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Value of people's feedback that is expected for a score, with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Block:
    """Pairs of score and feedback that were pooled. `score` is their lowest score, `total` the sum of their feedback
    values."""

    score: float
    count: int
    total: float

    @property
    def mean(self) -> float:
        return self.total / self.count


class Calibration:
    """Function from a score to the expected feedback, learned from pairs of a score and a feedback value about the same
    run, both from 0 to 1.

    The function never decreases. `calibrated` returns None if fewer than `count_min` feedback values support the
    result, or if its interval is wider than `width_max`.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[float, float]],
        *,
        count_min: int = 10,
        width_max: float = 0.5,
        confidence: float = 0.9,
    ) -> None:
        self._blocks = _pool(sorted(pairs))
        self._scores = [block.score for block in self._blocks]
        self._count_min = count_min
        self._width_max = width_max
        self._deviations = NormalDist().inv_cdf(0.5 + confidence / 2)

    def calibrated(self, score: float) -> Calibrated | None:
        """Return the expected feedback for a score, or None if the data do not suffice."""
        if not self._blocks:
            return None
        block = self._blocks[max(0, bisect_right(self._scores, score) - 1)]
        low, high = _wilson(block.total, block.count, self._deviations)
        if block.count < self._count_min or high - low > self._width_max:
            return None
        return Calibrated(block.mean, low, high)


def _wilson(successes: float, count: int, z: float) -> tuple[float, float]:
    """Return Wilson's score interval. This is a copy of `headrace_statistics.intervals.wilson`, because the client must
    not depend on that package."""
    share, squared = successes / count, z * z
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = z / (1 + squared / count) * math.sqrt(share * (1 - share) / count + squared / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _pool(pairs: Iterable[tuple[float, float]]) -> list[_Block]:
    """Pool pairs, which must be sorted by score, into blocks whose mean feedback increases (pool adjacent violators).

    Raises:
        ValueError: a score or a value is not from 0 to 1.
    """
    blocks: list[_Block] = []
    for score, equal in groupby(pairs, key=itemgetter(0)):
        values = [value for _, value in equal]
        if not all(0 <= number <= 1 for number in (score, *values)):
            raise ValueError(f"score {score:g} with values {values}: scores and values must be from 0 to 1")
        new = _Block(score, len(values), math.fsum(values))
        while blocks and blocks[-1].mean >= new.mean:
            before = blocks.pop()
            new = _Block(before.score, before.count + new.count, before.total + new.total)
        blocks.append(new)
    return blocks
