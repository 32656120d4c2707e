"""Tests of rater agreement, compared with scikit-learn 1.9.1, krippendorff 0.9.0, definitions and known
distributions."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from headrace_statistics.agreement import alpha, bootstrap_interval, kappa, nominal, raw_agreement, squared
from tests.support import presence

LETTERS = (
    "ab bb aa aa bb aa aa aa ba aa aa ab aa aa ba aa aa ba aa aa ab aa ab aa bb bb aa bb ba bb bb aa ba bb aa ab ba ab "
    "ab aa"
)
THREE = (
    "c-b cca acc -aa cba -a- bbb -a- cbb a-b --c cbc ccc ccc b-a b-c ccc -c- bc- bab cca cca ccc a-b -ac ba- a-- bbb "
    "b-- -ca aac aab ccc c-- bbc -bb -b- -cc b-- bcc bcc cbb --a -bb cac aa- cc- --- baa b-c"
)
SCORES = (
    "3--- 00-3 243- 14-1 22-2 0-1- -000 2322 344- 00-- ---- -111 03-3 24-- --44 --2- 4400 -0-- 1-1- -011 4-0- --30 "
    "24-0 0--- 333- -0-4 -203 3-13 -012 -1-3 -4-- 222- 3-31 00-4 -042 -4-- 244- -0-- 00-0 -443 -34- 0-03 -0-- 11-3 "
    "-4-3 3-3- 4-44 ---1 ---- 33-- 1--- 4-4- -222 03-- 244- --1- --03 4--1 20-- -01-"
)
TWO_SCORES = (
    "-0-0- -04-- 0-04- -4444 40444 ---0- -00-- 00--0 044-- 0-000 4---- 000-- -4-0- 0400- 0-44- ----- ----- --44- 4-4-4 "
    "4-400 -4-0- 0-0-- 0---4 0-00- ----0 ----0 0--0- --0-- 0---0 ---0- ---0-"
)
WORKED = """*    *    *    *    *    3    4    1    2    1    1    3    3    *    3
1    *    2    1    3    3    4    3    *    *    *    *    *    *    *
*    *    2    1    3    4    4    *    2    1    1    3    3    *    4"""
"""Krippendorff's worked example, one rater a line."""


def rows(text: str) -> list[list[Any]]:
    """Return the answers of each item: letters, or quarters as numbers, and None for a missing answer."""
    return [
        [None if letter == "-" else int(letter) / 4 if letter.isdigit() else letter for letter in item]
        for item in text.split()
    ]


def units(items: list[list[Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(answer for answer in item if answer is not None) for item in items)


def pairs(items: list[list[Any]]) -> Counter[tuple[Any, Any]]:
    return Counter((item[0], item[1]) for item in items if item[0] is not None and item[1] is not None)


@pytest.mark.parametrize(
    ("text", "difference", "of_two", "of_all"),
    [
        (LETTERS, nominal, 0.29729729729729726, 0.3056118999323867),
        (THREE, nominal, 0.2894736842105263, 0.18860992039191682),
        (SCORES, nominal, 0.3722826086956521, 0.2773405476307592),
        (SCORES, squared, 0.4677187948350072, 0.21758004836407063),
        (TWO_SCORES, nominal, -0.36363636363636354, 0.3185585585585585),
        (TWO_SCORES, squared, -0.36363636363636354, 0.3185585585585585),
    ],
)
def test_kappa_and_alpha_equal_the_reference_implementations(
    text: str, difference: Callable[[Any, Any], float], of_two: float, of_all: float
) -> None:
    assert kappa(pairs(rows(text)), difference) == pytest.approx(of_two, abs=1e-9)
    assert alpha(units(rows(text)), difference) == pytest.approx(of_all, abs=1e-9)


def test_alpha_equals_the_worked_example_of_krippendorff() -> None:
    columns = zip(*(line.split() for line in WORKED.split("\n")), strict=True)
    items = [[None if answer == "*" else int(answer) for answer in column] for column in columns]
    assert alpha(units(items)) == pytest.approx(0.691358024691358, abs=1e-9)
    assert alpha(units(items), squared) == pytest.approx(0.8108448928121059, abs=1e-9)


def _alpha_by_coincidences(items: list[list[Any]], difference: Callable[[Any, Any], float]) -> Fraction:
    """Return Krippendorff's alpha from the coincidence matrix, in exact arithmetic."""
    matrix: dict[tuple[Any, Any], Fraction] = {}
    for item in items:
        answers = [answer for answer in item if answer is not None]
        for at, first in enumerate(answers):
            for second in answers[:at] + answers[at + 1 :]:
                matrix[first, second] = matrix.get((first, second), Fraction(0)) + Fraction(1, len(answers) - 1)
    margins: dict[Any, Fraction] = {}
    for (first, _), share in matrix.items():
        margins[first] = margins.get(first, Fraction(0)) + share
    observed = sum(share * Fraction(difference(*pair)) for pair, share in matrix.items())
    expected = sum(
        margins[first] * margins[second] * Fraction(difference(first, second))
        for first in margins
        for second in margins
    )
    return Fraction(1 - (sum(margins.values()) - 1) * observed / expected)


def _kappa_by_shares(items: Counter[tuple[Any, Any]]) -> Fraction:
    """Return Cohen's kappa from observed and expected agreement, in exact arithmetic."""
    total = items.total()
    answers = {answer for pair in items for answer in pair}
    observed = Fraction(sum(items[answer, answer] for answer in answers), total)
    expected = sum(
        Fraction(sum(n for pair, n in items.items() if pair[0] == answer), total)
        * Fraction(sum(n for pair, n in items.items() if pair[1] == answer), total)
        for answer in answers
    )
    return Fraction((observed - expected) / (1 - expected))


@pytest.mark.parametrize("case", range(40))
def test_coefficients_of_random_answers_equal_exact_arithmetic(case: int) -> None:
    draws = random.Random(presence.draw_seed())
    levels, raters = draws.randint(2, 5), draws.randint(2, 6)
    items = [
        [None if draws.random() < 0.3 else draws.randrange(levels) / 4 for _ in range(raters)]
        for _ in range(draws.randint(10, 60))
    ]
    items += [[0.0] * raters, [0.25] * raters]
    for difference in (nominal, squared):
        expected = _alpha_by_coincidences(items, difference)
        assert alpha(units(items), difference) == pytest.approx(float(expected), abs=1e-9)
    assert kappa(pairs(items)) == pytest.approx(float(_kappa_by_shares(pairs(items))), abs=1e-9)
    assert raw_agreement(pairs(items)) == sum(n for (a, b), n in pairs(items).items() if a == b) / pairs(items).total()


def test_coefficients_without_variation_or_items_are_undefined() -> None:
    same = Counter({("a", "a"): 40})
    assert (kappa(same), alpha(same), raw_agreement(same)) == (None, None, 1.0)
    nothing: Counter[tuple[Any, Any]] = Counter()
    assert (kappa(nothing), alpha(nothing), raw_agreement(nothing)) == (None, None, None)
    assert alpha(Counter({("a",): 3, (): 2})) is None
    assert bootstrap_interval([], kappa, seed=1) is None
    assert bootstrap_interval([("a", "a")] * 40, kappa, seed=1) is None


def test_bootstrap_interval_of_a_mean_equals_the_normal_one() -> None:
    draws = random.Random(7)
    values = [draws.gauss(0, 1) for _ in range(400)]

    def mean(counts: Any) -> float:
        return math.fsum(value * count for value, count in counts.items()) / 400

    interval = bootstrap_interval(values, mean, seed=11, samples=4000)
    assert interval is not None
    centre = math.fsum(values) / 400
    error = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / 400 / 400)
    assert interval[0] == pytest.approx(centre - 1.96 * error, abs=0.1 * error)
    assert interval[1] == pytest.approx(centre + 1.96 * error, abs=0.1 * error)
    assert interval == bootstrap_interval(values, mean, seed=11, samples=4000), "a repeated call has the same result"
