"""Tests of estimates from a shadow, and of expected rewards that reduce a canary's variance.

Estimates are computed by hand, compared with a second implementation, and tested with versions of known difference. A
canary stays unbiased whatever the expectations are.
"""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks._rollout_trials import _Line
from benchmarks._shadow_canaries import far, near, sample
from benchmarks.shadow import as_pairs
from headrace_registry.rollouts import estimate as estimate_module
from headrace_registry.rollouts.estimate import (
    EstimateRequirements,
    Line,
    Overlap,
    ShadowEstimate,
    ShadowPair,
    estimate,
    fit,
    overlap,
    weight,
)
from headrace_registry.rollouts.findings import Expectations, expectations, prompt_kinds
from headrace_schemas import FunctionDefinition, Message, Tool
from headrace_statistics.e_process import Contrast, Regression
from headrace_statistics.intervals import quantile
from tests.support.turns import ask

ANY = EstimateRequirements.model_construct(pairs_min=1, spoke_min=1, effective_min=1.0, effective_share_min=0.01)


def test_overlap_equals_a_computation_by_hand() -> None:
    """Weights 2, 1, 1 and 0 give the effective sample size (4)² / (4 + 1 + 1) = 2 2/3 and the mean 1."""
    overlap_found = overlap([math.log(2), 0.0, 0.0, -math.inf])
    assert overlap_found.answers == 4
    assert overlap_found.effective == pytest.approx(16 / 6)
    assert overlap_found.mean == pytest.approx(1.0)
    assert overlap([]) == Overlap(0, 0.0, 0.0)
    assert weight(5000.0) == weight(50.0), "no overflow"


def test_overlap_refuses_equally_tiny_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_overlap = overlap([-20.0] * 100)
    assert tiny_overlap.effective == pytest.approx(100)
    assert "mean" in (tiny_overlap.refusal(25, 0.2) or "")
    monkeypatch.setattr(estimate_module, "MEAN_LOW", 0.0)  # the planted fault: to ask for the effective number alone
    assert tiny_overlap.refusal(25, 0.2) is None


def test_overlap_refuses_a_small_effective_sample_size() -> None:
    narrow_overlap = overlap([math.log(97.0), *([math.log(3 / 99)] * 99)])
    assert narrow_overlap.mean == pytest.approx(1.0)
    assert (narrow_overlap.refusal(25, 0.2) or "").startswith("no overlap: 100 answers count as 1.")


def test_calibration_fit_equals_a_computation_by_hand() -> None:
    line = fit([(0.0, 0.2), (1.0, 0.8)])
    assert (line.level, line.centre) == (0.5, 0.5)
    assert line.slope == pytest.approx(0.6)
    assert fit([(0.3, 1.0), (0.3, 0.0)]) == Line(0.5, 0.0, 0.3), "judged alike: the mean"
    assert fit([]).predict(0.9) == 0.5
    assert Line(0.5, 2.0, 0.5).predict(1.0) == 1.0, "nobody likes more than that"


def test_calibration_lines_leave_out_their_own_fold() -> None:
    sessions = [(number, number / 10, float(number == 3)) for number in range(10)]
    lines = estimate_module.fit_lines(sessions)
    assert lines[3] == fit([(judged, score) for number, judged, score in sessions if number not in (3, 8)])
    assert lines[3].predict(0.3) == 0.0, "the only one who liked anything is not in it"


def by_hand() -> list[ShadowPair]:
    """Return ten prompts with equal judgements.

    Five users liked their answer, which the candidate would have given 1.5 times as often as the champion; five
    disliked their answer, which the candidate would have given half as often.
    """
    return [
        ShadowPair(number, 0.5, 0.5, 0.5, 1.0 if number < 5 else 0.0, math.log(1.5 if number < 5 else 0.5))
        for number in range(10)
    ]


def test_estimate_equals_a_computation_by_hand() -> None:
    """Compute the estimate by hand.

    The regression predicts 1/2 for each prompt, so r = ±1/2. T1 = (5 · 1.5 · 1/2 - 5 · 0.5 · 1/2) / 10 = 1/4, T0 = 0. φ
    = 1.5 (1/2 - 1/4) - 1/2 = -1/8 for the first five and 0.5 (-1/2 - 1/4) + 1/2 = 1/8 for the others: the standard
    error is √(10/64 / 9 / 10) = 1/24. n_eff = 100 / (5 · 2.25 + 5 · 0.25) = 8, so t has 7 degrees of freedom.
    """
    result = estimate(by_hand(), ANY)
    assert result.overlap.effective == pytest.approx(8.0)
    assert result.difference == pytest.approx(0.25)
    assert result.lower == pytest.approx(0.25 - 2.3646 / 24, abs=1e-3)
    assert result.upper == pytest.approx(0.25 + 2.3646 / 24, abs=1e-3)


def test_estimate_with_equal_weights_has_no_correction() -> None:
    """Injected fault: equal weights, as if both versions gave the same answers, remove the difference of 1/4."""
    same = [
        ShadowPair(pair.number, pair.candidate, pair.champion, pair.judged, pair.user_value, 0.0) for pair in by_hand()
    ]
    assert estimate(same, ANY).difference == pytest.approx(0.0)


def again(pairs: list[ShadowPair]) -> tuple[float, float]:
    """Return the difference and its standard error, computed independently with arrays."""
    number = np.array([pair.number for pair in pairs])
    c, d = (np.array([getattr(pair, side) for pair in pairs]) for side in ("candidate", "champion"))
    judged, user_values, w = (
        np.array([np.nan if value is None else value for value in column])
        for column in zip(*[(pair.judged, pair.user_value, pair.log_weight) for pair in pairs], strict=True)
    )
    spoke = ~np.isnan(judged + user_values + w)
    w = np.where(spoke, np.exp(np.nan_to_num(w)), 0)
    slope, level = np.zeros(5), np.zeros(5)
    for left_out in range(5):
        of = spoke & (number % 5 != left_out)
        slope[left_out], level[left_out] = np.polyfit(judged[of], user_values[of], 1)
    fold = number % 5

    def f(x: NDArray[np.float64]) -> NDArray[np.float64]:
        predicted: NDArray[np.float64] = np.clip(level[fold] + slope[fold] * x, 0, 1)
        return predicted

    r = np.where(spoke, np.nan_to_num(user_values - f(np.nan_to_num(judged))), 0)
    t0, t1, p = r.sum() / spoke.sum(), (w * r).sum() / w.sum(), spoke.mean()
    direct = f(c) - f(d)
    phi = direct - direct.mean() + spoke / p * (w / w[spoke].mean() * (r - t1) - (r - t0))
    return float(direct.mean() + t1 - t0), float(phi.std(ddof=1) / math.sqrt(len(pairs)))


@pytest.mark.parametrize("seed", range(5))
def test_estimate_agrees_with_a_second_implementation(seed: int) -> None:
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    pairs = as_pairs(sample(chance, near(chance, 0.05), 120))
    result = estimate(pairs, ANY)
    difference, error = again(pairs)
    assert result.difference == pytest.approx(difference, abs=1e-9)
    half = quantile(0.975, result.overlap.effective - 1) * error
    assert result.lower == pytest.approx(difference - half)
    assert result.upper == pytest.approx(difference + half)


def test_estimate_intervals_cover_the_truth_unlike_judges_alone() -> None:
    """Test 100 samples of versions with a known difference and a judge that prefers the candidate's style."""
    seed = 7
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    pair = near(chance, -0.05)
    estimates = [estimate(as_pairs(sample(chance, pair, 300)), EstimateRequirements()) for _ in range(100)]
    assert sum(result.refused is not None for result in estimates) <= 5
    intervals = [
        (result.difference, result.lower, result.upper) for result in estimates if result.difference is not None
    ]
    covering = [low <= pair.truth <= high for _, low, high in intervals if low is not None and high is not None]
    assert np.mean(covering) >= 0.88
    assert abs(np.mean([difference for difference, _, _ in intervals]) - pair.truth) < 0.015


def test_estimate_refuses_versions_without_overlap() -> None:
    seed = 11
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    reasons = [estimate(as_pairs(sample(chance, far(chance), 300)), EstimateRequirements()).refused for _ in range(20)]
    assert all(reason is not None and reason.startswith("no overlap") for reason in reasons), reasons


@pytest.mark.parametrize(
    ("count", "spoke", "reason"), [(39, 39, "too few prompts"), (40, 29, "too few users"), (40, 30, None)]
)
def test_estimate_refuses_too_few_observations_with_the_reason(count: int, spoke: int, reason: str | None) -> None:
    dice = random.Random(1)
    pairs = [
        ShadowPair(number, 0.5, 0.5, dice.random(), 1.0 if number < spoke else None, 0.0) for number in range(count)
    ]
    result = estimate(pairs, EstimateRequirements())
    assert (result.refused or "").partition(":")[0] == (reason or "")
    assert (result.difference is None) == (reason is not None)


def test_estimate_refuses_no_observations() -> None:
    result = estimate([], EstimateRequirements())
    assert result == ShadowEstimate(0, 0, Overlap(0, 0.0, 0.0), None, refused=result.refused)
    assert result.refused


def message(role: str, text: str) -> Message:
    return Message.model_validate({"role": role, "content": text})


def test_prompt_kinds_are_ordered_and_independent_of_answers() -> None:
    requests = (message("system", "be brief"), message("user", "hello"))
    first = ask(requests, "hi", task_id="greet")
    assert [kind.partition(":")[0] for kind in prompt_kinds(first)] == ["agent", "task", "opening"]
    later = ask((*requests, message("assistant", "hi"), message("user", "and now?")), "what", task_id="greet")
    assert prompt_kinds(later) == prompt_kinds(first)
    other = ask((requests[0], message("user", "bye")), "hi", task_id="greet")
    assert prompt_kinds(other)[:2] == prompt_kinds(first)[:2]
    assert prompt_kinds(other)[2] != prompt_kinds(first)[2]
    tools = (Tool(function=FunctionDefinition(name="search")),)
    assert prompt_kinds(ask(requests, "hi", task_id="greet", tools=tools))[0] != prompt_kinds(first)[0]
    assert [kind.partition(":")[0] for kind in prompt_kinds(ask(requests, "hi"))] == ["agent", "opening"]


def test_expectations_equal_a_computation_by_hand() -> None:
    """The mean of 1, 0 and 1/2 is 1/2. Task a has 1 and 0.5: (1.5 + 2 · 1/2) / (2 + 2) = 0.625."""
    expected = expectations(
        [(("task:a",), {"reward": 1.0}), (("task:b",), {"reward": 0.0}), (("task:a",), {"reward": 0.5})]
    )
    assert expected.of(("task:a",)) == {"reward": pytest.approx(0.625)}
    assert expected.of(("task:c",)) == {"reward": pytest.approx(0.5)}, "unknown: as the rest"
    assert expected.of(("task:a", "opening:x")) == {"reward": pytest.approx(0.625)}
    assert Expectations().of(("task:a",)) == {}


def test_expectations_bound_the_number_of_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_registry.rollouts.findings._KINDS_MAX", 3)
    expected = expectations([((f"task:{number}",), {"reward": 1.0}) for number in range(9)])
    assert len(expected.table["reward"]) == 3
    assert expected.table["reward"][""] == (9.0, 9.0)


def test_regression_predicts_the_expectation_for_the_first_unit() -> None:
    assert Regression().predict(0.3) == pytest.approx(0.3)


def test_regression_is_least_squares_over_earlier_units() -> None:
    dice = random.Random(3)
    line, again = Regression(), _Line(1, np.bool_(True))
    seen: list[tuple[float, float]] = []
    for _ in range(200):
        expected = dice.random()
        value = min(1.0, max(0.0, 0.2 + 0.5 * expected + 0.1 * dice.gauss(0, 1)))
        foretold = line.predict(expected)
        assert again.take(np.array([expected]), np.array([value]), np.array([True]))[0] == pytest.approx(foretold)
        line.update(expected, value)
        seen.append((expected, value))
    xs, ys = zip(*seen, strict=True)
    slope, level = np.polyfit(np.array(xs), np.array(ys), 1)
    assert line.predict(0.8) == pytest.approx(level + slope * 0.8, abs=0.02)


def test_contrast_predicts_a_unit_before_it_updates_the_regression() -> None:
    """Otherwise the centre would depend on the arm. The two values of x in each arm add up to 0 for every
    expectation."""
    dice = random.Random(4)
    contrast = Contrast()
    for _ in range(100):
        value, expected = dice.random(), dice.choice([None, 0.0, 1.0, dice.random()])
        other = copy.deepcopy(contrast)
        mine = contrast.of(value, candidate=dice.random() < 0.5, expected=expected)
        contrasts = [copy.deepcopy(other).of(value, candidate=arm, expected=expected) for arm in (True, False)]
        assert sum(contrasts) == pytest.approx(0.0)
        assert mine in contrasts
        assert all(-1.0 <= contrast_value <= 1.0 for contrast_value in contrasts)


def _mean_and_variance(expect: bool, lying: bool, *, effect: float) -> tuple[float, float]:
    """Return the mean and the variance of the contrasts of 6,000 units of forty tasks."""
    dice = random.Random(5)
    hard = [0.1, 0.9] * 20
    contrast, contrasts = Contrast(), []
    for _ in range(6000):
        task = dice.randrange(40)
        candidate = dice.random() < 0.5
        value = float(dice.random() < hard[task] + effect * candidate)
        expected = (1 - hard[task] if lying else hard[task]) if expect else None
        contrasts.append(contrast.of(value, candidate=candidate, expected=expected))
    return float(np.mean(contrasts)), float(np.var(contrasts))


@pytest.mark.parametrize("lying", [False, True])
def test_contrast_with_expectations_keeps_the_mean_and_reduces_variance(lying: bool) -> None:
    """Rewards are 0.1 and 0.9 with equal frequency: of the variance 1/4, 0.16 lies between tasks.

    The slope of the regression corrects wrong expectations.
    """
    plain, informed = _mean_and_variance(False, lying, effect=0.0), _mean_and_variance(True, lying, effect=0.0)
    assert abs(informed[0]) < 0.02
    assert plain[1] == pytest.approx(0.25, abs=0.01)
    assert informed[1] == pytest.approx(0.09, abs=0.015)
    assert _mean_and_variance(True, lying, effect=0.1)[0] == pytest.approx(0.05, abs=0.02)
