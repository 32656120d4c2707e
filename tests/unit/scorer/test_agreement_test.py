"""The alarm for judges: its bound and its bets by their exact definition, and its behaviour over a long time."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from headrace_scorer.agreement_test import Agreement, upper_bound

ERROR, REFERENCE = 0.05, 100


def test_the_bets_are_fair_however_long_one_looks() -> None:
    """The mean evidence over all sequences of a coin, whose mean is the bound, is 1 after every step."""
    bound = 0.3
    for length in range(1, 9):
        expected = 0.0
        for coins in itertools.product((0.0, 1.0), repeat=length):
            state = Agreement(pairs=REFERENCE, bound=bound)
            for coin in coins:
                state = state.with_pair(coin, reference=REFERENCE, error=ERROR)
            heads = sum(coins)
            expected += bound**heads * (1 - bound) ** (length - heads) * state.evidence(REFERENCE)
        assert expected == pytest.approx(1.0)


@pytest.mark.parametrize(("wrong", "count"), [(0, 20), (3, 20), (10, 50), (20, 20)])
def test_the_bound_is_that_of_an_exact_binomial_or_wider(wrong: int, count: int) -> None:
    """A mean above it gives so few wrong ones with less than the allowed error."""
    bound = upper_bound(wrong / count, count, 0.05)
    assert bound >= min(0.95, wrong / count)
    with_pair = math.fsum(math.comb(count, n) * bound**n * (1 - bound) ** (count - n) for n in range(wrong + 1))
    assert wrong == count or with_pair <= 0.05 + 1e-9


def _stream(draw: random.Random, count: int, mean: float) -> list[float]:
    return [min(1.0, max(0.0, draw.gauss(mean, 0.2))) for _ in range(count)]


def _alarm(values: list[float]) -> int | None:
    state = Agreement()
    for number, value in enumerate(values, 1):
        state = state.with_pair(value, reference=REFERENCE, error=ERROR)
        if state.has_drifted(reference=REFERENCE, error=ERROR):
            return number
    return None


def test_a_judge_that_falls_is_found_after_it_was_good_for_long_and_a_steady_one_is_left_alone() -> None:
    draw = random.Random(0)
    assert [_alarm(_stream(draw, 600, 0.3)) for _ in range(10)] == [None] * 10
    for _ in range(10):
        alarm = _alarm(_stream(draw, 500, 0.25) + _stream(draw, 200, 0.6))
        assert alarm is not None
        assert 500 < alarm < 640


def test_what_it_knows_survives_being_stored() -> None:
    draw = random.Random(1)
    state = other = Agreement()
    for value in _stream(draw, 150, 0.3):
        state = state.with_pair(value, reference=REFERENCE, error=ERROR)
        other = Agreement.model_validate_json(
            other.with_pair(value, reference=REFERENCE, error=ERROR).model_dump_json()
        )
    assert state == other
