"""Expectations of units, and a canary that stays fair whatever they are."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from benchmarks._rollout_trials import _Line
from headrace_registry.rollouts.findings import Expectations, expectations, prompt_kinds
from headrace_schemas import FunctionDefinition, Message, Tool
from headrace_statistics.contrast import Contrast
from headrace_statistics.regression import Regression
from tests.support.turns import ask


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
    """All together 1, 0 and 1/2: the mean is 1/2. Task a has 1 and 0.5: (1.5 + 2 · 1/2) / (2 + 2) = 0.625."""
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
    """Otherwise the centre would depend on the arm. The two values of x in either arm add up to 0 for every
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


def _spread(expect: bool, lying: bool, *, effect: float) -> tuple[float, float]:
    """Mean and variance of x over 6,000 units of forty tasks."""
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
    """Rewards of 0.1 and 0.9 evenly: of a variance of 1/4, 0.16 lies between tasks. The slope corrects wrong
    expectations."""
    plain, informed = _spread(False, lying, effect=0.0), _spread(True, lying, effect=0.0)
    assert abs(informed[0]) < 0.02
    assert plain[1] == pytest.approx(0.25, abs=0.01)
    assert informed[1] == pytest.approx(0.09, abs=0.015)
    assert _spread(True, lying, effect=0.1)[0] == pytest.approx(0.05, abs=0.02)
