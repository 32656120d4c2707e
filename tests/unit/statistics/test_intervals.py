"""Tests of confidence sequences, standard errors, quantiles of Student's t, and rater agreement.

Confidence sequences are compared with the authors' implementation, the definition and exact sums, standard errors with
values computed by hand and with simulated repetitions, quantiles with closed forms and with 60 digits of mpmath, and
agreement with scikit-learn 1.9.1, krippendorff 0.9.0, definitions and known distributions.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import mpmath
import pytest

from headrace_statistics import agreement
from headrace_statistics.intervals import (
    ConfidenceSequence,
    Score,
    difference,
    lower_bound,
    mean,
    mean_margin,
    quantile,
)
from tests.support import presence

VALUES = [((7 * index * index + 3 * index) % 11) / 10 for index in range(200)]
AFTER = (1, 5, 20, 50, 100, 200)
CONFSEQ = {
    0.05: ((0.0, 1.0), (0.0, 0.894), (0.216, 0.652), (0.266, 0.548), (0.297, 0.506), (0.323, 0.48)),
    0.2: ((0.0, 1.0), (0.063, 0.787), (0.254, 0.599), (0.291, 0.518), (0.316, 0.486), (0.337, 0.466)),
}
"""The ends after so many of `VALUES` as in `AFTER`, by the formulas of `betting_cs` with
`lambda_predmix_eb(x, alpha=alpha / 2)` in the authors' package confseq (github.com/gostevehoward/confseq), on a grid of
thousandths that it widens by one on each side."""


@pytest.mark.parametrize("alpha", sorted(CONFSEQ))
def test_confidence_sequence_equals_the_authors_package(alpha: float) -> None:
    sequence = ConfidenceSequence(alpha)
    for number, value in enumerate(VALUES, 1):
        sequence.update(value)
        if number in AFTER:
            interval, (lower, upper) = sequence.interval(), CONFSEQ[alpha][AFTER.index(number)]
            assert lower - 1e-9 <= interval.lower <= lower + 0.002 or interval.lower == lower == 0.0
            assert upper - 0.002 <= interval.upper <= upper + 1e-9 or interval.upper == upper == 1.0


def test_confidence_sequence_equals_a_computation_by_hand() -> None:
    """Compute the confidence sequence by hand for α = 0.8 and a single value 1.

    λ = √(2 ln 2.5 / (ln 2 / 4)) = 3.25, and the limit is 2/α = 2.5. Left of m = 1/2 / 3.25 = 0.154, K⁺ = 1 + 3.25 (1 -
    m), which is more than 2.5; right of it K⁺ = 1 + (1 - m) / 2m = 2.5 at m = 1/4.
    """
    sequence = ConfidenceSequence(0.8)
    sequence.update(1.0)
    assert sequence.interval().lower == pytest.approx(0.25)
    assert sequence.interval().upper == 1.0


def test_confidence_sequence_covers_the_mean_at_all_times() -> None:
    """Over all 2^9 sequences of nine tosses, the probability that the mean is ever excluded is at most α."""
    for true_mean, alpha in ((Fraction(1, 2), 0.5), (Fraction(3, 4), 0.5), (Fraction(1, 5), 0.3)):
        missed = Fraction(0)
        for course in itertools.product((0, 1), repeat=9):
            sequence, out = ConfidenceSequence(alpha), False
            for toss in course:
                sequence.update(toss)
                interval = sequence.interval()
                out = out or not interval.lower <= true_mean <= interval.upper
            chance = math.prod((true_mean if toss else 1 - true_mean for toss in course), start=Fraction(1))
            missed += out * chance
        assert missed <= Fraction(alpha)


@pytest.mark.parametrize("seed", range(3))
def test_confidence_sequence_narrows_to_the_mean(seed: int) -> None:
    print(f"seed {seed}")
    chance, sequence, widths = random.Random(seed), ConfidenceSequence(0.05), []
    for number in range(1, 1001):
        sequence.update(chance.betavariate(6, 2))
        if number in (10, 100, 1000):
            interval = sequence.interval()
            widths.append(interval.upper - interval.lower)
            assert interval.lower <= 0.75 <= interval.upper
    assert widths[0] > widths[1] > widths[2]
    assert widths[2] < 0.05


def test_mean_equals_values_computed_by_hand() -> None:
    """The deviations by task are -1, 0 and 1 from the mean 0.5 over six plays: √(2 · 3/2) / 6."""
    plays = [("a", 0.0), ("a", 0.0), ("b", 0.5), ("b", 0.5), ("c", 1.0), ("c", 1.0)]
    single = mean([plays])
    assert (single.value, single.over_seeds) == (0.5, None)
    assert single.error == single.over_tasks == pytest.approx(math.sqrt(2 * 3 / 2) / 6)
    both = mean([plays, [(task, 0.1) for task, _ in plays]])
    assert both.value == pytest.approx(0.3)
    assert both.over_seeds == pytest.approx(0.4 / math.sqrt(2) / math.sqrt(2))
    assert both.over_tasks == pytest.approx(single.error / 2)
    assert both.error == max(both.over_seeds or 0, both.over_tasks)


def test_differences_are_between_plays_of_one_task() -> None:
    base = [("a", 0.0), ("b", 1.0)]
    assert difference([base], [base]).within()
    better = difference([[("a", 0.5), ("b", 1.5)]], [base])
    assert (better.value, better.error) == (0.5, 0.0), "the same on each task"
    assert not better.within()
    with pytest.raises(AssertionError):
        difference([[("b", 1.0), ("a", 0.0)]], [base])


@pytest.mark.parametrize("shared", [False, True], ids=["tasks of its own", "the same tasks"])
def test_two_standard_errors_cover_the_true_mean(shared: bool) -> None:
    """The simulation has five slightly different seeds, 40 tasks of different difficulty, and three plays of each
    task."""
    generator = random.Random(5)
    print("seed 5")
    inside, spread, errors = 0, [], []
    for _ in range(400):
        tasks = [generator.gauss(0.0, 0.2) for _ in range(40)]
        seeds: list[list[Score]] = []
        for _ in range(5):
            level = generator.gauss(0.5, 0.03)
            seed_tasks = tasks if shared else [generator.gauss(0.0, 0.2) for _ in range(40)]
            seeds.append(
                [
                    (str(n), level + easy + generator.gauss(0, 0.3))
                    for n, easy in enumerate(seed_tasks)
                    for _ in range(3)
                ]
            )
        result = mean(seeds, shared=shared)
        inside += abs(result.value - 0.5) <= 2 * result.error
        spread.append(result.value)
        errors.append(result.error)
    share, actual_spread = inside / 400, statistics.stdev(spread)
    print(f"{share:.3f} inside, spread {actual_spread:.4f}, said {statistics.fmean(errors):.4f}")
    assert 0.9 <= share <= 0.995
    assert 0.95 * actual_spread <= statistics.fmean(errors) <= 1.4 * actual_spread


def test_a_single_task_has_an_error_of_half_the_range() -> None:
    assert mean([[("a", 1.0), ("a", 1.0)]]).error == 0.5


def test_few_tasks_with_equal_means_have_an_error_above_zero() -> None:
    """Two tasks with equal means have plays that differ: √(1/3 · 1/4), as with four independent plays."""
    plays = [("a", 0.0), ("a", 1.0), ("b", 1.0), ("b", 0.0)]
    assert mean([plays]).error == pytest.approx(math.sqrt(1 / 3 / 4))


TOLERANCE = 1e-10
TAILS = (
    1e-300, 1e-100, 1e-30, 1e-10, 1e-6, 0.0005, 0.005, 0.025, 0.05, 0.1, 0.2, 0.2499999, 0.25, 0.25000001, 0.3, 0.4,
)  # fmt: skip
NEAR_THE_CENTRE = (0.45, 0.49, 0.4999, 0.499999999)


def cauchy(p: float) -> float:
    """Return the quantile for one degree of freedom."""
    return -1 / math.tan(math.pi * p) if p < 0.25 else math.tan(math.pi * (p - 0.5))


def two(p: float) -> float:
    """Return the quantile for two degrees of freedom (Shaw, J. Computational Finance 9, 2006)."""
    return (2 * p - 1) / math.sqrt(2 * p * (1 - p))


def four(p: float) -> float:
    """Return the quantile for four degrees of freedom (Shaw 2006). Cancellation loses digits near the centre."""
    with mpmath.workdps(400):
        share = mpmath.mpf(p)
        root = mpmath.sqrt(4 * share * (1 - share))
        size = 2 * mpmath.sqrt(mpmath.cos(mpmath.acos(root) / 3) / root - 1)
        return math.copysign(float(size), p - 0.5)


@pytest.mark.parametrize(("freedom", "closed_form"), [(1, cauchy), (2, two), (4, four)])
@pytest.mark.parametrize("p", TAILS + NEAR_THE_CENTRE)
def test_quantile_agrees_with_the_closed_forms(freedom: int, closed_form: Callable[[float], float], p: float) -> None:
    assert quantile(p, freedom) == pytest.approx(closed_form(p), rel=TOLERANCE)
    assert quantile(1 - p, freedom) == pytest.approx(-quantile(1 - (1 - p), freedom), rel=TOLERANCE)


def relative_error(t: float, p: float, freedom: float) -> float:
    """Return the relative error of the quantile `t`, from its probability in 60 digits and the density there."""
    with mpmath.workdps(60):
        nu, x, half = mpmath.mpf(freedom), abs(mpmath.mpf(t)), mpmath.mpf(1) / 2
        tail = min(mpmath.mpf(p), 1 - mpmath.mpf(p))
        if tail > 0.25:
            centre = mpmath.betainc(half, nu / 2, 0, x * x / (nu + x * x), regularized=True) / 2
            missing = half - tail - centre
        else:
            missing = mpmath.betainc(nu / 2, half, 0, nu / (nu + x * x), regularized=True) / 2 - tail
        density = mpmath.gamma((nu + 1) / 2) / mpmath.gamma(nu / 2) / mpmath.sqrt(nu * mpmath.pi)
        return abs(float(missing / (density * (1 + x * x / nu) ** (-(nu + 1) / 2) * x)))


@pytest.mark.parametrize("freedom", [0.1, 0.5, 1, 1.5, 2, 3, 5, 7, 8, 20, 39.9, 40.1, 100, 1e3, 1e5, 1e7])
def test_quantile_agrees_with_60_digits(freedom: float) -> None:
    seed = 17
    print(f"seed {seed}")
    chance = random.Random(f"{seed} {freedom}")
    probabilities = [*TAILS, *NEAR_THE_CENTRE, *(chance.random() for _ in range(10)), 0.975, 0.995, 1 - 1e-9]
    for p in probabilities:
        t = quantile(p, freedom)
        if math.isinf(t):  # the quantile itself is beyond the largest float
            assert mpmath.mpf(min(p, 1 - p)) ** (-1 / mpmath.mpf(freedom)) > mpmath.mpf("1e300")
            continue
        assert relative_error(t, p, freedom) < TOLERANCE, (p, freedom, t)


def test_quantile_is_the_normal_one_for_infinite_freedom() -> None:
    for p in (1e-12, 0.01, 0.2, 0.4, 0.6, 0.975):
        assert quantile(p, math.inf) == pytest.approx(NormalDist().inv_cdf(p), rel=1e-9)


def test_quantile_bounds() -> None:
    assert quantile(0.5, 3) == 0
    assert (quantile(0, 1), quantile(1, 1)) == (-math.inf, math.inf)
    assert quantile(0.975, 1) == pytest.approx(12.706204736174694, rel=1e-14)
    for p, freedom in ((-0.1, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.5, 0.0), (0.5, -1.0), (0.5, math.nan)):
        with pytest.raises(ValueError, match="must be"):
            quantile(p, freedom)


def test_the_expansion_that_was_used_before_is_caught() -> None:
    """Injected fault: Abramowitz and Stegun 26.7.5 for one and two degrees of freedom."""

    def expansion(p: float, freedom: float) -> float:
        x = NormalDist().inv_cdf(p)
        terms = (x**3 + x) / 4, (5 * x**5 + 16 * x**3 + 3 * x) / 96, (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384
        fourth = (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160
        return x + sum(term / freedom**power for power, term in enumerate((*terms, fourth), 1))

    assert expansion(0.975, 1) == pytest.approx(11.30, abs=0.01)
    assert relative_error(expansion(0.975, 1), 0.975, 1) > 0.05
    assert relative_error(expansion(0.975, 8), 0.975, 8) > TOLERANCE


def test_margins_of_few_values() -> None:
    assert mean_margin([1.0, 2.0], 0.975) == pytest.approx(12.706204736174694 * math.sqrt(0.5) / math.sqrt(2))
    assert math.isinf(mean_margin([1.0], 0.975))
    assert lower_bound([1.0, 2.0], 0.025) == pytest.approx(1.5 - mean_margin([1.0, 2.0], 0.975))
    assert lower_bound([1.0], 0.025) == -math.inf
    assert lower_bound([], 0.025) == -math.inf


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
        (LETTERS, agreement.nominal, 0.29729729729729726, 0.3056118999323867),
        (THREE, agreement.nominal, 0.2894736842105263, 0.18860992039191682),
        (SCORES, agreement.nominal, 0.3722826086956521, 0.2773405476307592),
        (SCORES, agreement.squared, 0.4677187948350072, 0.21758004836407063),
        (TWO_SCORES, agreement.nominal, -0.36363636363636354, 0.3185585585585585),
        (TWO_SCORES, agreement.squared, -0.36363636363636354, 0.3185585585585585),
    ],
)
def test_kappa_and_alpha_equal_the_reference_implementations(
    text: str, difference: Callable[[Any, Any], float], of_two: float, of_all: float
) -> None:
    assert agreement.kappa(pairs(rows(text)), difference) == pytest.approx(of_two, abs=1e-9)
    assert agreement.alpha(units(rows(text)), difference) == pytest.approx(of_all, abs=1e-9)


def test_alpha_equals_the_worked_example_of_krippendorff() -> None:
    columns = zip(*(line.split() for line in WORKED.split("\n")), strict=True)
    items = [[None if answer == "*" else int(answer) for answer in column] for column in columns]
    assert agreement.alpha(units(items)) == pytest.approx(0.691358024691358, abs=1e-9)
    assert agreement.alpha(units(items), agreement.squared) == pytest.approx(0.8108448928121059, abs=1e-9)


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
    for distance in (agreement.nominal, agreement.squared):
        expected = _alpha_by_coincidences(items, distance)
        assert agreement.alpha(units(items), distance) == pytest.approx(float(expected), abs=1e-9)
    assert agreement.kappa(pairs(items)) == pytest.approx(float(_kappa_by_shares(pairs(items))), abs=1e-9)
    assert (
        agreement.raw_agreement(pairs(items))
        == sum(n for (a, b), n in pairs(items).items() if a == b) / pairs(items).total()
    )


def test_coefficients_without_variation_or_items_are_undefined() -> None:
    same = Counter({("a", "a"): 40})
    assert (agreement.kappa(same), agreement.alpha(same), agreement.raw_agreement(same)) == (None, None, 1.0)
    nothing: Counter[tuple[Any, Any]] = Counter()
    assert (agreement.kappa(nothing), agreement.alpha(nothing), agreement.raw_agreement(nothing)) == (None, None, None)
    assert agreement.alpha(Counter({("a",): 3, (): 2})) is None
    assert agreement.bootstrap_interval([], agreement.kappa, seed=1) is None
    assert agreement.bootstrap_interval([("a", "a")] * 40, agreement.kappa, seed=1) is None


def test_bootstrap_interval_of_a_mean_equals_the_normal_one() -> None:
    draws = random.Random(7)
    values = [draws.gauss(0, 1) for _ in range(400)]

    def mean(counts: Any) -> float:
        return math.fsum(value * count for value, count in counts.items()) / 400

    interval = agreement.bootstrap_interval(values, mean, seed=11, samples=4000)
    assert interval is not None
    centre = math.fsum(values) / 400
    error = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / 400 / 400)
    assert interval[0] == pytest.approx(centre - 1.96 * error, abs=0.1 * error)
    assert interval[1] == pytest.approx(centre + 1.96 * error, abs=0.1 * error)
    assert interval == agreement.bootstrap_interval(values, mean, seed=11, samples=4000), (
        "a repeated call has the same result"
    )
