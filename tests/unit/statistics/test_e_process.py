"""The e-process, against numbers worked by hand and against the sum over everything that can happen."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest

from headrace_statistics.e_process import EProcess


def wealth(bets: EProcess, values: Sequence[float]) -> list[float]:
    """After each value."""
    wealths = []
    for value in values:
        bets.update(value)
        wealths.append(math.exp(bets.log_wealth))
    return wealths


def test_e_process_equals_a_computation_by_hand() -> None:
    """Null 0, gap 1/2.

    1. variance 1, advantage 1/2: stake (1/2) / (1 + 1/4) = 0.4, at a value of 1: 1.4
    2. variance 1/2, advantage max(1/2, 3/4 - √(1/4)): stake (1/2) / (1/2 + 1/4) is more than 1/2, at -1: 1.4 · 0.5
    3. mean 0, squares 2, variance 3/3, stake 0.4, at 1/2: 0.7 · 1.2
    """
    assert wealth(EProcess(0.0, 0.5), (1.0, -1.0, 0.5)) == pytest.approx([1.4, 0.7, 0.84])


def test_stake_grows_with_the_observed_advantage() -> None:
    """Values of 0.6 and 0.8 in turn: mean 0.7 less a standard error, against a gap of 0.1. The stake is capped."""
    bets = EProcess(null=-0.1, gap=0.1)
    wealth(bets, [0.6, 0.8] * 25)
    assert bets.stake() == pytest.approx(0.5 / 0.9)
    assert EProcess(null=-0.1, gap=0.1).stake() == pytest.approx(0.1 / 1.01)


@pytest.mark.parametrize(
    ("null", "chances"), [(0.0, (0.25, 0.5, 0.25)), (-0.1, (0.35, 0.4, 0.25)), (-0.5, (0.6, 0.3, 0.1))]
)
def test_e_process_is_a_martingale_at_the_null(null: float, chances: tuple[float, float, float]) -> None:
    """Every sequence of eight values of -1, 0, 1, weighed with its probability: E[K] = 1 and P(max K ≥ 1/α) ≤ α."""
    assert -chances[0] + chances[2] == pytest.approx(null)
    mean = 0.0
    ever = dict.fromkeys((0.5, 0.3, 0.2), 0.0)
    for outcomes in itertools.product(range(3), repeat=8):
        chance = math.prod(chances[index] for index in outcomes)
        seen = wealth(EProcess(null, 0.25), [index - 1.0 for index in outcomes])
        mean += chance * seen[-1]
        for error in ever:
            ever[error] += chance * (max(seen) >= 1 / error)
    assert mean == pytest.approx(1.0)
    for error, wealths in ever.items():
        assert 0 < wealths <= error


def test_e_process_shrinks_on_average_below_the_null() -> None:
    chances = (0.3, 0.5, 0.2)
    total = sum(
        math.prod(chances[index] for index in outcomes)
        * wealth(EProcess(0.0, 0.25), [index - 1.0 for index in outcomes])[-1]
        for outcomes in itertools.product(range(3), repeat=7)
    )
    assert total < 0.95


@pytest.mark.parametrize("seed", range(5))
def test_e_process_mean_and_error_equal_the_statistics_module(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    values = [chance.uniform(-1, 1) for _ in range(chance.randint(2, 300))]
    bets = EProcess(0.0, 0.1)
    wealth(bets, values)
    assert bets.mean == pytest.approx(statistics.fmean(values))
    assert bets.standard_error == pytest.approx(statistics.stdev(values) / len(values) ** 0.5)


def test_standard_error_needs_two_values() -> None:
    bets = EProcess(0.0, 0.1)
    assert (bets.mean, bets.standard_error) == (0.0, None)
    bets.update(0.5)
    assert (bets.mean, bets.standard_error) == (0.5, None)
    bets.update(-0.5)
    assert bets.standard_error == pytest.approx(0.5), "distances of 1/2 from the mean: √(1/2 / 1 / 2)"


def test_null_is_rejected_at_one_over_the_error() -> None:
    bets = EProcess(0.0, 0.5)
    wealth(bets, [1.0])
    assert bets.null_rejected(1 / 1.4 + 1e-9)
    assert not bets.null_rejected(1 / 1.4 - 1e-9)
    assert EProcess(0.0, 0.5, log_wealth=-math.log(0.02)).null_rejected(0.02), "exactly there is enough"


def test_e_process_loses_at_most_half_of_its_wealth_at_once() -> None:
    for null in (0.0, -0.05, -1.0 + 1e-9, -1.0):
        for before in itertools.product((-1.0, 1.0), repeat=5):
            bets = EProcess(null, 0.3)
            wealth(bets, before)
            assert bets.stake() * (-1.0 - null) >= -0.5 - 1e-12
