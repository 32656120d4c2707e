"""The e-processes of a rollout, against the sum over everything that can happen, in exact fractions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest

from headrace_statistics.contrast import Contrast
from headrace_statistics.e_process import EProcess
from headrace_statistics.mixture_e_process import PARTS, MixtureEProcess
from headrace_statistics.sample_ratio import SampleRatio

HALF = Fraction(1, 2)
OUTCOMES = [(candidate, good) for candidate in (True, False) for good in (1, 0)]
"""Outcomes of one session: its arm, and whether it succeeded."""


def exact_wealths(sessions: Sequence[tuple[bool, int]], null: Fraction, gaps: Sequence[Fraction]) -> list[Fraction]:
    """Return the exact wealth after each session, in fractions. Only the stakes, which the bound leaves free, are
    floats."""
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
    """All 4^5 courses of five sessions: E[K] = 1 exactly, and P(max K ≥ 1/α) ≤ α."""
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
    """A tenth is tolerated and lost, while the control moves from 9/10 over 5/10 to 7/10 and 6/10."""
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
    """Centres 1/2, (1/2 + 1)/2 = 3/4, (1/2 + 1 + 0)/3 = 1/2."""
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
    """Over all 2^10 sequences of arms, also when the plan changes halfway: E = 1 exactly, and P(max ≥ 1/α) ≤ α."""
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
    while not ratio.broken(0.01):
        ratio.update(candidate=seen % 4 != 0)
        seen += 1
    assert 40 < seen < 150
