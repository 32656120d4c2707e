"""What is expected of a unit, and that a canary stays fair whatever is expected."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from benchmarks._rollout_trials import _Line
from headrace_registry.rollouts.contrast import Contrast
from headrace_registry.rollouts.regression import Regression
from headrace_registry.shadow.expectations import Expectations, expectations, kinds
from headrace_schemas import FunctionDefinition, Message, Tool
from tests.support.turns import ask


def said(role: str, text: str) -> Message:
    return Message.model_validate({"role": role, "content": text})


def test_kinds_go_from_the_general_to_the_special_and_know_nothing_of_answers() -> None:
    asked = (said("system", "be brief"), said("user", "hello"))
    first = ask(asked, "hi", task_id="greet")
    assert [kind.partition(":")[0] for kind in kinds(first)] == ["agent", "task", "opening"]
    later = ask((*asked, said("assistant", "hi"), said("user", "and now?")), "what", task_id="greet")
    assert kinds(later) == kinds(first)
    other = ask((asked[0], said("user", "bye")), "hi", task_id="greet")
    assert kinds(other)[:2] == kinds(first)[:2]
    assert kinds(other)[2] != kinds(first)[2]
    tools = (Tool(function=FunctionDefinition(name="search")),)
    assert kinds(ask(asked, "hi", task_id="greet", tools=tools))[0] != kinds(first)[0]
    assert [kind.partition(":")[0] for kind in kinds(ask(asked, "hi"))] == ["agent", "opening"]


def test_expectations_by_hand() -> None:
    """All together 1, 0 and 1/2: the mean is 1/2. Task a has 1 and 0.5: (1.5 + 2 · 1/2) / (2 + 2) = 0.625."""
    found = expectations(
        [(("task:a",), {"reward": 1.0}), (("task:b",), {"reward": 0.0}), (("task:a",), {"reward": 0.5})]
    )
    assert found.of(("task:a",)) == {"reward": pytest.approx(0.625)}
    assert found.of(("task:c",)) == {"reward": pytest.approx(0.5)}, "unknown: as the rest"
    assert found.of(("task:a", "opening:x")) == {"reward": pytest.approx(0.625)}
    assert Expectations().of(("task:a",)) == {}


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_registry.shadow.expectations._KINDS_MAX", 3)
    found = expectations([((f"task:{number}",), {"reward": 1.0}) for number in range(9)])
    assert len(found.table["reward"]) == 3
    assert found.table["reward"][""] == (9.0, 9.0)


def test_the_first_unit_is_what_was_expected_of_it() -> None:
    assert Regression().foretell(0.3) == pytest.approx(0.3)


def test_a_line_through_the_units_before_by_least_squares() -> None:
    dice = random.Random(3)
    line, again = Regression(), _Line(1, np.bool_(True))
    seen: list[tuple[float, float]] = []
    for _ in range(200):
        expected = dice.random()
        value = min(1.0, max(0.0, 0.2 + 0.5 * expected + 0.1 * dice.gauss(0, 1)))
        foretold = line.foretell(expected)
        assert again.take(np.array([expected]), np.array([value]), np.array([True]))[0] == pytest.approx(foretold)
        line.see(expected, value)
        seen.append((expected, value))
    xs, ys = zip(*seen, strict=True)
    slope, level = np.polyfit(np.array(xs), np.array(ys), 1)
    assert line.foretell(0.8) == pytest.approx(level + slope * 0.8, abs=0.02)


def test_a_unit_moves_the_line_only_after_it_was_foretold() -> None:
    """Else the centre would know the arm. x of one value in either arm adds up to nothing, whatever was expected."""
    dice = random.Random(4)
    contrast = Contrast()
    for _ in range(100):
        value, expected = dice.random(), dice.choice([None, 0.0, 1.0, dice.random()])
        other = copy.deepcopy(contrast)
        mine = contrast.of(value, candidate=dice.random() < 0.5, expected=expected)
        theirs = [copy.deepcopy(other).of(value, candidate=arm, expected=expected) for arm in (True, False)]
        assert sum(theirs) == pytest.approx(0.0)
        assert mine in theirs
        assert all(-1.0 <= one <= 1.0 for one in theirs)


def _spread(expect: bool, lying: bool, *, effect: float) -> tuple[float, float]:
    """Mean and variance of x over 6,000 units of forty tasks."""
    dice = random.Random(5)
    hard = [0.1, 0.9] * 20
    contrast, found = Contrast(), []
    for _ in range(6000):
        task = dice.randrange(40)
        candidate = dice.random() < 0.5
        value = float(dice.random() < hard[task] + effect * candidate)
        expected = (1 - hard[task] if lying else hard[task]) if expect else None
        found.append(contrast.of(value, candidate=candidate, expected=expected))
    return float(np.mean(found)), float(np.var(found))


@pytest.mark.parametrize("lying", [False, True])
def test_expectations_take_variance_away_and_move_no_mean(lying: bool) -> None:
    """0.1 and 0.9 evenly: of a variance of 1/4, 0.16 lies between tasks. Who lies is found out by the slope."""
    plain, known = _spread(False, lying, effect=0.0), _spread(True, lying, effect=0.0)
    assert abs(known[0]) < 0.02
    assert plain[1] == pytest.approx(0.25, abs=0.01)
    assert known[1] == pytest.approx(0.09, abs=0.015)
    assert _spread(True, lying, effect=0.1)[0] == pytest.approx(0.05, abs=0.02)
