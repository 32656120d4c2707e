"""Summaries of rates and latencies for reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Sorted values, at least one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(tuple(sorted(values)))

    def rate(self) -> dict[str, float]:
        """Return the best round, which is the least disturbed, and the median."""
        return {"best": round(self.values[-1]), "median": round(statistics.median(self.values))}

    def latency(self) -> dict[str, float]:
        return {name: round(self.quantile(share), 2) for name, share in {"p50": 0.5, "p95": 0.95, "p99": 0.99}.items()}

    def quantile(self, share: float) -> float:
        """Return the smallest value that `share` of all values do not exceed."""
        return self.values[max(0, math.ceil(share * len(self.values) - 1e-9) - 1)]
