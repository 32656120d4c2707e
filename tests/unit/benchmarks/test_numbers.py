"""Quantiles of reports, against their definition."""

from __future__ import annotations

import random
from fractions import Fraction

from benchmarks._numbers import Summary
from headrace_operations.jobs.check_report import CheckReport


def test_quantile_is_the_smallest_value_that_the_share_does_not_exceed() -> None:
    seed = 3
    print(f"seed {seed}")
    chance = random.Random(seed)
    for count in range(1, 203):
        summary = Summary.of([chance.random() for _ in range(count)])
        for percent in (0, 1, 50, 95, 99, 100):
            enough = [
                value
                for value in summary.values
                if sum(other <= value for other in summary.values) >= Fraction(percent, 100) * count
            ]
            assert summary.quantile(percent / 100) == min(enough), (count, percent)


def test_token_quantiles_lie_within_the_lengths() -> None:
    assert CheckReport(lengths=[]).spread() == {}
    assert CheckReport(lengths=[7]).spread() == {"least": 7, "median": 7, "95 of 100": 7, "most": 7}
    assert CheckReport(lengths=[100, 200]).spread() == {"least": 100, "median": 150, "95 of 100": 195, "most": 200}
    for count in range(1, 60):
        shown = list(CheckReport(lengths=[number * number for number in range(count)]).spread().values())
        assert shown == sorted(shown), f"{count} lengths"
