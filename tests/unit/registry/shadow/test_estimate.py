"""What answers that nobody saw say of users: by hand, by a second implementation, against versions whose truth is
known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks._shadow_worlds import far, near, sample
from benchmarks.shadow import as_pairs
from headrace_registry.shadow import calibration
from headrace_registry.shadow import overlap as overlap_module
from headrace_registry.shadow.calibration import Line, fit
from headrace_registry.shadow.demands import Demands
from headrace_registry.shadow.estimate import ShadowEstimate, ShadowPair, estimate
from headrace_registry.shadow.overlap import Overlap, overlap, weight
from headrace_statistics import student_t

ANY = Demands.model_construct(pairs_min=1, spoke_min=1, effective_min=1.0, effective_share_min=0.01)


def test_the_effective_sample_size_by_hand() -> None:
    """Weights 2, 1, 1 and 0: (4)² / (4 + 1 + 1) = 2 2/3, and their mean is 1."""
    found = overlap([math.log(2), 0.0, 0.0, -math.inf])
    assert found.answers == 4
    assert found.effective == pytest.approx(16 / 6)
    assert found.mean == pytest.approx(1.0)
    assert overlap([]) == Overlap(0, 0.0, 0.0)
    assert weight(5000.0) == weight(50.0), "no overflow"


def test_weights_that_are_all_equally_tiny_do_not_pass_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    found = overlap([-20.0] * 100)
    assert found.effective == pytest.approx(100)
    assert "mean" in (found.refusal(25, 0.2) or "")
    monkeypatch.setattr(overlap_module, "MEAN_LOW", 0.0)  # the planted fault: to ask for the effective number alone
    assert found.refusal(25, 0.2) is None


def test_few_answers_with_all_the_weight_are_refused() -> None:
    found = overlap([math.log(97.0), *([math.log(3 / 99)] * 99)])
    assert found.mean == pytest.approx(1.0)
    assert (found.refusal(25, 0.2) or "").startswith("no overlap: 100 answers count as 1.")


def test_a_line_by_hand() -> None:
    found = fit([(0.0, 0.2), (1.0, 0.8)])
    assert (found.level, found.centre) == (0.5, 0.5)
    assert found.slope == pytest.approx(0.6)
    assert fit([(0.3, 1.0), (0.3, 0.0)]) == Line(0.5, 0.0, 0.3), "judged alike: the mean"
    assert fit([]).foretell(0.9) == 0.5
    assert Line(0.5, 2.0, 0.5).foretell(1.0) == 1.0, "nobody likes more than that"


def test_who_is_foretold_takes_no_part_in_the_line() -> None:
    known = [(number, number / 10, float(number == 3)) for number in range(10)]
    lines = calibration.lines(known)
    assert lines[3] == fit([(judged, said) for number, judged, said in known if number not in (3, 8)])
    assert lines[3].foretell(0.3) == 0.0, "the only one who liked anything is not in it"


def by_hand() -> list[ShadowPair]:
    """Ten prompts, judged alike. Five users liked their answer, which the candidate would have given half as often
    again as the champion did; five did not, theirs half as often."""
    return [
        ShadowPair(number, 0.5, 0.5, 0.5, 1.0 if number < 5 else 0.0, math.log(1.5 if number < 5 else 0.5))
        for number in range(10)
    ]


def test_the_estimate_by_hand() -> None:
    """Every line says 1/2, so r = ±1/2. T1 = (5 · 1.5 · 1/2 - 5 · 0.5 · 1/2) / 10 = 1/4, T0 = 0. φ = 1.5 (1/2 - 1/4) -
    1/2 = -1/8 for the first five and 0.5 (-1/2 - 1/4) + 1/2 = 1/8 for the others: the standard error is √(10/64 / 9 /
    10) = 1/24. n_eff = 100 / (5 · 2.25 + 5 · 0.25) = 8, so t has 7 degrees of freedom."""
    found = estimate(by_hand(), ANY)
    assert found.overlap.effective == pytest.approx(8.0)
    assert found.difference == pytest.approx(0.25)
    assert found.lower == pytest.approx(0.25 - 2.3646 / 24, abs=1e-3)
    assert found.upper == pytest.approx(0.25 + 2.3646 / 24, abs=1e-3)


def test_without_weights_nothing_is_corrected() -> None:
    """The planted fault: as if both versions gave the same answers. Nothing is left of the quarter."""
    same = [ShadowPair(one.number, one.candidate, one.champion, one.judged, one.said, 0.0) for one in by_hand()]
    assert estimate(same, ANY).difference == pytest.approx(0.0)


def again(pairs: list[ShadowPair]) -> tuple[float, float]:
    """The same by arrays: the difference and its standard error."""
    number = np.array([one.number for one in pairs])
    c, d = (np.array([getattr(one, side) for one in pairs]) for side in ("candidate", "champion"))
    judged, said, w = (
        np.array([np.nan if value is None else value for value in column])
        for column in zip(*[(one.judged, one.said, one.log_weight) for one in pairs], strict=True)
    )
    spoke = ~np.isnan(judged + said + w)
    w = np.where(spoke, np.exp(np.nan_to_num(w)), 0)
    slope, level = np.zeros(5), np.zeros(5)
    for left_out in range(5):
        of = spoke & (number % 5 != left_out)
        slope[left_out], level[left_out] = np.polyfit(judged[of], said[of], 1)
    fold = number % 5

    def f(x: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.clip(level[fold] + slope[fold] * x, 0, 1)
        return found

    r = np.where(spoke, np.nan_to_num(said - f(np.nan_to_num(judged))), 0)
    t0, t1, p = r.sum() / spoke.sum(), (w * r).sum() / w.sum(), spoke.mean()
    direct = f(c) - f(d)
    phi = direct - direct.mean() + spoke / p * (w / w[spoke].mean() * (r - t1) - (r - t0))
    return float(direct.mean() + t1 - t0), float(phi.std(ddof=1) / math.sqrt(len(pairs)))


@pytest.mark.parametrize("seed", range(5))
def test_a_second_implementation_says_the_same(seed: int) -> None:
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    pairs = as_pairs(sample(chance, near(chance, 0.05), 120))
    found = estimate(pairs, ANY)
    difference, error = again(pairs)
    assert found.difference == pytest.approx(difference, abs=1e-9)
    half = student_t.quantile(0.975, found.overlap.effective - 1) * error
    assert found.lower == pytest.approx(difference - half)
    assert found.upper == pytest.approx(difference + half)


def test_intervals_hold_the_truth_and_judges_alone_do_not() -> None:
    """A hundred samples of versions whose truth is a sum; the judge likes a style that the candidate has more of."""
    seed = 7
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    pair = near(chance, -0.05)
    found = [estimate(as_pairs(sample(chance, pair, 300)), Demands()) for _ in range(100)]
    assert sum(one.refused is not None for one in found) <= 5
    known = [(one.difference, one.lower, one.upper) for one in found if one.difference is not None]
    held = [low <= pair.truth <= high for _, low, high in known if low is not None and high is not None]
    assert np.mean(held) >= 0.88
    assert abs(np.mean([difference for difference, _, _ in known]) - pair.truth) < 0.015


def test_versions_that_have_nothing_to_do_with_each_other_are_refused() -> None:
    seed = 11
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    reasons = [estimate(as_pairs(sample(chance, far(chance), 300)), Demands()).refused for _ in range(20)]
    assert all(reason is not None and reason.startswith("no overlap") for reason in reasons), reasons


@pytest.mark.parametrize(
    ("count", "spoke", "reason"), [(39, 39, "too few prompts"), (40, 29, "too few users"), (40, 30, None)]
)
def test_too_little_is_refused_by_name(count: int, spoke: int, reason: str | None) -> None:
    dice = random.Random(1)
    pairs = [
        ShadowPair(number, 0.5, 0.5, dice.random(), 1.0 if number < spoke else None, 0.0) for number in range(count)
    ]
    found = estimate(pairs, Demands())
    assert (found.refused or "").partition(":")[0] == (reason or "")
    assert (found.difference is None) == (reason is not None)


def test_nothing_at_all_is_refused() -> None:
    found = estimate([], Demands())
    assert found == ShadowEstimate(0, 0, Overlap(0, 0.0, 0.0), None, refused=found.refused)
    assert found.refused
