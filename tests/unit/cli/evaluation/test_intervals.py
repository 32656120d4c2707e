"""Intervals against values that were worked out elsewhere, and against what they promise."""

from __future__ import annotations

import random

import pytest

from headrace_operations.evaluation.intervals import bootstrap, measure


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775328), (5, 10, 0.2365931, 0.7634069), (10, 10, 0.7224672, 1.0), (81, 263, 0.2552704, 0.3661954)],
)
def test_wilson_as_in_the_tables(successes: int, count: int, low: float, high: float) -> None:
    """The last line is Newcombe's example (1998, table I, 81 of 263)."""
    assert wilson(successes, count) == pytest.approx((low, high), abs=1e-4)


def test_wilson_holds_what_it_promises() -> None:
    """Exactly, by all outcomes of 40 plays: the mean coverage over shares is at least 94 %."""
    from math import comb

    shares = [place / 50 for place in range(1, 50)]
    covered = []
    for share in shares:
        outcomes = [(n, comb(40, n) * share**n * (1 - share) ** (40 - n)) for n in range(41)]
        covered.append(sum(weight for n, weight in outcomes if wilson(n, 40)[0] <= share <= wilson(n, 40)[1]))
    assert sum(covered) / len(covered) > 0.94


def test_a_bootstrap_draws_tasks_and_not_plays() -> None:
    """Ten plays of each of eight tasks that always come out the same are eight values, and the interval says so."""
    draw = random.Random(1)
    tasks = [[draw.random()] * 10 for _ in range(8)]
    single = [[plays[0]] for plays in tasks]
    assert bootstrap(tasks, 0) == pytest.approx(bootstrap(single, 0))
    pooled = bootstrap([[value] for plays in tasks for value in plays], 0)
    low, high = bootstrap(tasks, 0)
    assert high - low > 2 * (pooled[1] - pooled[0]), "drawing plays would have promised too much"


def test_a_bootstrap_is_as_wide_as_theory_says() -> None:
    draw = random.Random(2)
    values = [[draw.gauss(3, 2)] for _ in range(400)]
    low, high = bootstrap(values, 0)
    assert high - low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.15)
    assert bootstrap(values, 0) == (low, high), "the same seed draws the same"
    assert bootstrap(values, 1) != (low, high)


def test_shares_of_single_plays_have_wilsons_interval() -> None:
    found = measure([[1.0], [0.0], [1.0], [1.0]], 0)
    assert (found.mean, found.count, found.tasks, found.interval) == (0.75, 4, 4, "wilson")
    assert (found.low, found.high) == wilson(3, 4)
    assert measure([[1.0, 0.0], [1.0, 1.0]], 0).interval == "bootstrap", "plays of one task are alike"
    assert measure([[0.5], [1.0]], 0).interval == "bootstrap"
    certain = measure([[2.0], [2.0]], 0)
    assert (certain.low, certain.mean, certain.high) == (2.0, 2.0, 2.0)
