"""Is the candidate no worse than the champion? A paired comparison over the same held-out tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_ROUNDING = 1e-12
"""What sums of binary fractions may be off by: 0.30 − 0.35 must not fail a margin of 0.05."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean scores over the tasks, the mean of the paired differences and its standard error."""

    tasks: int
    score: float
    champion_score: float
    difference: float
    standard_error: float | None
    """Sample standard deviation of the differences over the square root of their number; None for a single task."""

    def not_inferior(self, margin: float) -> bool:
        """Whether the candidate's mean is at least the champion's minus `margin`."""
        return self.difference >= -margin - _ROUNDING

    def statistics(self) -> dict[str, float]:
        numbers = {
            "tasks": float(self.tasks),
            "score": self.score,
            "champion_score": self.champion_score,
            "difference": self.difference,
        }
        return numbers if self.standard_error is None else {**numbers, "standard_error": self.standard_error}


def mean(scores: Mapping[str, float]) -> float:
    return math.fsum(scores.values()) / len(scores)


def compare(candidate: Mapping[str, float], champion: Mapping[str, float]) -> Comparison:
    """Pair by task. Raises `ValueError` unless both have the same tasks, at least one: a task that one of them lacks is
    neither left out nor counted as zero.
    """
    if not candidate or candidate.keys() != champion.keys():
        raise ValueError(f"{len(candidate.keys() ^ champion.keys())} tasks were scored for one version only")
    differences = [candidate[task] - champion[task] for task in sorted(candidate)]
    count = len(differences)
    centre = math.fsum(differences) / count
    error = None
    if count > 1:
        variance = math.fsum((value - centre) ** 2 for value in differences) / (count - 1)
        error = math.sqrt(variance / count)
    return Comparison(count, mean(candidate), mean(champion), centre, error)
