"""Confidence intervals, compared with published values and with their coverage."""

from __future__ import annotations

import random

import pytest

from headrace_operations.evaluation.intervals import bootstrap, measure
from headrace_statistics.intervals import wilson


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775328), (5, 10, 0.2365931, 0.7634069), (10, 10, 0.7224672, 1.0), (81, 263, 0.2552704, 0.3661954)],
)
def test_wilson_equals_published_values(successes: int, count: int, low: float, high: float) -> None:
    """The last line is Newcombe's example (1998, table I, 81 of 263)."""
    assert wilson(successes, count) == pytest.approx((low, high), abs=1e-4)


def test_wilson_covers_the_share_often_enough() -> None:
    """The mean coverage over shares, computed exactly from all outcomes of 40 plays, is at least 94 %."""
    from math import comb

    shares = [number / 50 for number in range(1, 50)]
    covered = []
    for share in shares:
        outcomes = [(n, comb(40, n) * share**n * (1 - share) ** (40 - n)) for n in range(41)]
        covered.append(sum(weight for n, weight in outcomes if wilson(n, 40)[0] <= share <= wilson(n, 40)[1]))
    assert sum(covered) / len(covered) > 0.94


def test_a_bootstrap_resamples_tasks() -> None:
    """Ten equal plays of each of eight tasks are worth eight values, so the interval is as wide as with one play
    each."""
    draw = random.Random(1)
    tasks = [[draw.random()] * 10 for _ in range(8)]
    single = [[plays[0]] for plays in tasks]
    assert bootstrap(tasks, 0) == pytest.approx(bootstrap(single, 0))
    pooled = bootstrap([[value] for plays in tasks for value in plays], 0)
    low, high = bootstrap(tasks, 0)
    assert high - low > 2 * (pooled[1] - pooled[0]), "resampling plays would make the interval too narrow"


def test_a_bootstrap_is_as_wide_as_the_normal_interval() -> None:
    draw = random.Random(2)
    values = [[draw.gauss(3, 2)] for _ in range(400)]
    low, high = bootstrap(values, 0)
    assert high - low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.15)
    assert bootstrap(values, 0) == (low, high), "the same seed draws the same"
    assert bootstrap(values, 1) != (low, high)


def test_shares_of_single_plays_have_wilsons_interval() -> None:
    measurement = measure([[1.0], [0.0], [1.0], [1.0]], 0)
    assert (measurement.mean, measurement.count, measurement.tasks, measurement.interval) == (0.75, 4, 4, "wilson")
    assert (measurement.low, measurement.high) == wilson(3, 4)
    assert measure([[1.0, 0.0], [1.0, 1.0]], 0).interval == "bootstrap", "plays of one task are alike"
    assert measure([[0.5], [1.0]], 0).interval == "bootstrap"
    certain = measure([[2.0], [2.0]], 0)
    assert (certain.low, certain.mean, certain.high) == (2.0, 2.0, 2.0)
