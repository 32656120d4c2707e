"""Tests of e-processes, compared with values computed by hand and with exact sums over all possible sequences.

The e-processes of a rollout are computed in exact fractions. A family of tests never spends more than its error budget,
however many versions it has.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from fractions import Fraction

import pytest

from headrace_statistics.e_process import (
    PARTS,
    Contrast,
    EProcess,
    MixtureEProcess,
    SampleRatio,
    harm_error,
    promotion_error,
    refusal_error,
    success_error,
    succession_error,
)


def wealth(bets: EProcess, values: Sequence[float]) -> list[float]:
    """Return the wealth after each value."""
    wealths = []
    for value in values:
        bets.update(value)
        wealths.append(math.exp(bets.log_wealth))
    return wealths


def test_e_process_equals_a_computation_by_hand() -> None:
    """Compute the wealth by hand for the null mean 0 and the gap 1/2.

    1. variance 1, advantage 1/2: stake (1/2) / (1 + 1/4) = 0.4; the value 1 gives 1.4
    2. variance 1/2, advantage max(1/2, 3/4 - √(1/4)): stake (1/2) / (1/2 + 1/4), capped at 1/2; -1 gives 1.4 · 0.5
    3. mean 0, squares 2, variance 3/3, stake 0.4; the value 1/2 gives 0.7 · 1.2
    """
    assert wealth(EProcess(0.0, 0.5), (1.0, -1.0, 0.5)) == pytest.approx([1.4, 0.7, 0.84])


def test_stake_grows_with_the_observed_advantage() -> None:
    """Values alternate between 0.6 and 0.8: mean 0.7 less a standard error, with a gap of 0.1. The stake is capped."""
    bets = EProcess(null=-0.1, gap=0.1)
    wealth(bets, [0.6, 0.8] * 25)
    assert bets.stake() == pytest.approx(0.5 / 0.9)
    bets.stake_max = 0.75
    assert bets.stake() == pytest.approx(0.75 / 0.9)
    assert EProcess(null=-0.1, gap=0.1).stake() == pytest.approx(0.1 / 1.01)


@pytest.mark.parametrize("stake_max", [0.5, 0.75])
@pytest.mark.parametrize(
    ("null", "chances"), [(0.0, (0.25, 0.5, 0.25)), (-0.1, (0.35, 0.4, 0.25)), (-0.5, (0.6, 0.3, 0.1))]
)
def test_e_process_is_a_martingale_at_the_null(
    null: float, chances: tuple[float, float, float], stake_max: float
) -> None:
    """Over all sequences of eight values of -1, 0, 1, weighted by probability: E[K] = 1 and P(max K ≥ 1/α) ≤ α."""
    assert -chances[0] + chances[2] == pytest.approx(null)
    mean = 0.0
    ever = dict.fromkeys((0.5, 0.3, 0.2), 0.0)
    for outcomes in itertools.product(range(3), repeat=8):
        chance = math.prod(chances[index] for index in outcomes)
        seen = wealth(EProcess(null, 0.25, stake_max=stake_max), [index - 1.0 for index in outcomes])
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


@pytest.mark.parametrize("stake_max", [0.5, 0.75])
def test_e_process_loses_at_most_its_largest_stake_at_once(stake_max: float) -> None:
    for null in (0.0, -0.05, -1.0 + 1e-9, -1.0):
        for before in itertools.product((-1.0, 1.0), repeat=5):
            bets = EProcess(null, 0.3, stake_max=stake_max)
            wealth(bets, before)
            assert bets.stake() * (-1.0 - null) >= -stake_max - 1e-12


HALF = Fraction(1, 2)
OUTCOMES = [(candidate, good) for candidate in (True, False) for good in (1, 0)]
"""Outcomes of one session: its arm, and whether it succeeded."""


def exact_wealths(sessions: Sequence[tuple[bool, int]], null: Fraction, gaps: Sequence[Fraction]) -> list[Fraction]:
    """Return the exact wealth after each session as fractions. Only the stakes, which may be arbitrary, are floats."""
    contrast_count, contrast_total = 0, Fraction(0)
    gamblers = [EProcess(float(null), float(gap)) for gap in gaps]
    wealths = [Fraction(part).limit_denominator(3) for _, part in PARTS][: len(gaps)]
    course = []
    for candidate, good in sessions:
        centre = (contrast_total + HALF) / (contrast_count + 1)
        contrast_count, contrast_total = contrast_count + 1, contrast_total + good
        value = -(good - centre) if candidate else good - centre
        for at, gambler in enumerate(gamblers):
            wealths[at] *= 1 + Fraction(gambler.stake()) * (value - null)
            gambler.update(float(value))
        course.append(sum(wealths, Fraction(0)))
    return course


def probability(sessions: Sequence[tuple[bool, int]], candidate: Fraction, control: Fraction) -> Fraction:
    chance = Fraction(1)
    for arm, good in sessions:
        success = candidate if arm else control
        chance *= HALF * (success if good else 1 - success)
    return chance


@pytest.mark.parametrize(("candidate", "control"), [(Fraction(7, 10), Fraction(7, 10)), (HALF, HALF)])
def test_harm_wealth_is_a_martingale_without_harm(candidate: Fraction, control: Fraction) -> None:
    """Over all 4^5 sequences of five sessions: E[K] = 1 exactly, and P(max K ≥ 1/α) ≤ α."""
    mean, ever = Fraction(0), dict.fromkeys((HALF, Fraction(7, 10), Fraction(4, 5)), Fraction(0))
    total = Fraction(0)
    for sessions in itertools.product(OUTCOMES, repeat=5):
        chance = probability(sessions, candidate, control)
        seen = exact_wealths(sessions, Fraction(0), (Fraction(1, 4), HALF))
        total += chance
        mean += chance * seen[-1]
        for error in ever:
            ever[error] += chance * (max(seen) >= 1 / error)
    assert total == 1
    assert mean == 1
    assert all(0 < rejected_share <= error for error, rejected_share in ever.items())


@pytest.mark.parametrize(
    ("candidate", "control", "sign"), [(Fraction(8, 10), Fraction(7, 10), -1), (HALF, Fraction(9, 10), 1)]
)
def test_harm_wealth_shrinks_for_better_and_grows_for_worse_versions(
    candidate: Fraction, control: Fraction, sign: int
) -> None:
    mean = sum(
        (
            probability(sessions, candidate, control) * exact_wealths(sessions, Fraction(0), (HALF,))[-1]
            for sessions in itertools.product(OUTCOMES, repeat=5)
        ),
        Fraction(0),
    )
    alone = Fraction(PARTS[0][1]).limit_denominator(3)
    assert (mean - alone) * sign > 0


def test_harm_wealth_is_fair_at_the_tolerated_loss_under_drift() -> None:
    """The tolerated loss is 1/10, and the candidate loses 1/10 while the control drifts between 9/10 and 5/10."""
    hours = [Fraction(9, 10), Fraction(5, 10), Fraction(7, 10), Fraction(6, 10)]
    tenth, mean = Fraction(1, 10), Fraction(0)
    for sessions in itertools.product(OUTCOMES, repeat=len(hours)):
        chance = math.prod(
            (probability([session], hour - tenth, hour) for session, hour in zip(sessions, hours, strict=True)),
            start=Fraction(1),
        )
        mean += chance * exact_wealths(sessions, tenth / 2, (Fraction(1, 4), HALF))[-1]
    assert mean == 1


def test_harm_wealth_equals_the_exact_computation() -> None:
    for sessions in itertools.islice(itertools.product(OUTCOMES, repeat=6), 0, None, 97):
        contrast, hedge = Contrast(), MixtureEProcess(0.0, 0.25)
        for candidate, good in sessions:
            hedge.update(-contrast.of(good, candidate=candidate))
        exact = exact_wealths(sessions, Fraction(0), (Fraction(1, 4), HALF))[-1]
        assert math.exp(hedge.log_wealth) == pytest.approx(float(exact))
        assert hedge.null_rejected(float(1 / exact) * (1 + 1e-9))
        assert not hedge.null_rejected(float(1 / exact) * (1 - 1e-9))


def test_contrast_equals_a_computation_by_hand() -> None:
    """The centres are 1/2, (1/2 + 1)/2 = 3/4 and (1/2 + 1 + 0)/3 = 1/2."""
    contrast = Contrast()
    assert contrast.of(1.0, candidate=True) == pytest.approx(0.5)
    assert contrast.of(0.0, candidate=True) == pytest.approx(-0.75)
    assert contrast.of(1.0, candidate=False) == pytest.approx(-0.5)


def exact_ratio(arms: Sequence[bool], planned: Sequence[Fraction]) -> list[Fraction]:
    counts, evidence, ratios = {True: 0, False: 0}, Fraction(1), []
    for arm, share in zip(arms, planned, strict=True):
        chance = share if arm else 1 - share
        evidence *= (100 * chance + counts[arm]) / (100 + sum(counts.values())) / chance
        counts[arm] += 1
        ratios.append(evidence)
    return ratios


def test_sample_ratio_is_a_martingale_for_even_arms() -> None:
    """Over all 2^10 sequences of arms, also if the plan changes halfway: E = 1 exactly, and P(max ≥ 1/α) ≤ α."""
    for planned in ([HALF] * 10, [HALF] * 4 + [Fraction(1, 10)] * 6):
        mean, ever, error = Fraction(0), Fraction(0), Fraction(9, 10)
        for arms in itertools.product((True, False), repeat=10):
            chance = math.prod(
                (share if arm else 1 - share for arm, share in zip(arms, planned, strict=True)), start=Fraction(1)
            )
            evidence = exact_ratio(arms, planned)
            mean += chance * evidence[-1]
            ever += chance * (max(evidence) >= 1 / error)
        assert mean == 1
        assert 0 < ever <= error


def test_sample_ratio_equals_the_exact_computation() -> None:
    arms, planned = [True, True, False, True] * 30, [HALF] * 60 + [Fraction(3, 4)] * 60
    ratio = SampleRatio()
    for arm, share in zip(arms, planned, strict=True):
        ratio.update(candidate=arm, planned=float(share))
    assert ratio.log_evidence == pytest.approx(math.log(exact_ratio(arms, planned)[-1]))


def test_sample_ratio_rejects_three_to_one() -> None:
    ratio = SampleRatio()
    seen = 0
    while not ratio.ratio_rejected(0.01):
        ratio.update(candidate=seen % 4 != 0)
        seen += 1
    assert 40 < seen < 150


def test_spending_equals_a_computation_by_hand() -> None:
    assert [promotion_error(0.05, number) for number in (1, 2, 3)] == pytest.approx([0.02, 0.04 / 6, 0.04 / 12])
    assert [succession_error(0.05, number) for number in (1, 2)] == pytest.approx([0.005, 0.01 / 6])
    assert [refusal_error(0.05, opponents) for opponents in (1, 2)] == pytest.approx([0.025, 0.0125])
    assert [success_error(0.05, 2, metrics) for metrics in (1, 4)] == pytest.approx([0.04 / 6, 0.01 / 6])
    assert [harm_error(0.05, share) for share in (1.0, 0.25)] == pytest.approx([0.05, 0.0125])


@pytest.mark.parametrize("versions", [1, 40, 10_000])
def test_spending_never_exceeds_alpha(versions: int) -> None:
    """The spent parts of alpha add up to Σ 1/(k(k+1)) = 1 - 1/(n+1)."""
    spent = sum(promotion_error(0.05, number) + succession_error(0.05, number) for number in range(1, versions + 1))
    assert spent == pytest.approx(0.05 * float(1 - Fraction(1, versions + 1)))
    assert spent < 0.05
