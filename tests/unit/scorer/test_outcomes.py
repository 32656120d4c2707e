"""A return value of a reward function is a score, an abstention or a failure, never 0.0 by accident (P6)."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from headrace_schemas import Reward, RewardResult
from headrace_scorer.functions.outcomes import outcome_of, raised
from tests.support.streams import START


@pytest.mark.parametrize(
    ("returned", "value"),
    [(0.5, 0.5), (1, 1.0), (True, 1.0), (0, 0.0), (Fraction(1, 4), 0.25), (-3.0, -3.0), (Decimal("0.5"), 0.5)],
)
def test_a_number_scores(returned: Any, value: float) -> None:
    assert (outcome_of(returned).outcome, outcome_of(returned).value) == ("scored", value)


def test_criteria_score_by_their_mean_or_by_their_value() -> None:
    both = outcome_of({"correct": 1.0, "short": 0.0})
    assert (both.value, both.criteria) == (0.5, {"correct": 1.0, "short": 0.0})
    outcome = outcome_of({"correct": 1.0, "short": 0.0, "value": 0.9})
    assert (outcome.value, outcome.criteria) == (0.9, {"correct": 1.0, "short": 0.0})


def test_a_result_may_have_reasons() -> None:
    outcome = outcome_of(RewardResult(criteria={"a": 1.0, "b": 0.5}, reason="because"))
    assert (outcome.outcome, outcome.value, outcome.reason) == ("scored", 0.75, "because")


@pytest.mark.parametrize("returned", [None, RewardResult(), RewardResult(reason="no idea"), {"value": None, "a": 1}])
def test_nothing_abstains(returned: Any) -> None:
    assert (outcome_of(returned).outcome, outcome_of(returned).value) == ("abstained", None)


@pytest.mark.parametrize(
    "returned",
    [
        float("nan"),
        float("inf"),
        "1.0",
        b"1",
        [],
        {},
        object(),
        1 + 2j,
        {"a": "good"},
        {"a": float("nan")},
        {"a": None},
        {1: 0.5},
        {"a": 1, "value": "x"},
        10**400,
        {str(n): 1.0 for n in range(65)},
        {"": 1.0},
        (0.5,),
        type("Lazy", (), {"__float__": lambda self: 1.0})(),
    ],
)
def test_anything_else_has_failed(returned: Any) -> None:
    outcome = outcome_of(returned)
    assert (outcome.outcome, outcome.value) == ("failed", None)
    assert outcome.reason


def test_every_outcome_makes_a_reward_event() -> None:
    for returned in (0.5, None, "x", {"a": 1.0}):
        outcome = outcome_of(returned)
        reward = Reward(
            time=START,
            trajectory_id="t",
            session_key="a" * 16,
            source="function:x",
            outcome=outcome.outcome,
            value=outcome.value,
            criteria=outcome.criteria,
            reason=outcome.reason,
        )
        assert reward.outcome == outcome.outcome


def test_plain_values_of_other_libraries_score() -> None:
    for number in (np.bool_(True), np.array(1), np.float32(1), Decimal(1), torch.tensor(1.0), torch.tensor(True)):
        assert (outcome_of(number).outcome, outcome_of(number).value) == ("scored", 1.0)
        assert outcome_of({"a": number, "b": number}).criteria == {"a": 1.0, "b": 1.0}
        assert outcome_of({"value": number}).value == 1.0
        assert outcome_of(RewardResult(value=number)).value == 1.0


def test_an_error_whose_text_fails_is_a_failure_that_can_be_sent() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Scalar:
        shape = ()

        def item(self) -> float:
            raise Broken

    for error in (Broken(), ValueError("bad \ud83d end\x00"), ValueError("x" * 10**6)):
        outcome = raised(error)
        assert outcome.outcome == "failed"
        outcome.model_dump_json().encode()
    assert outcome_of(Scalar()).outcome == "failed"


def test_an_exception_says_what_and_where() -> None:
    try:
        raise ValueError("x" * 9999)
    except ValueError as error:
        outcome = raised(error)
    assert outcome.outcome == "failed"
    assert (outcome.reason or "").startswith("ValueError: xxx")
    assert 2000 < len(outcome.reason or "") <= 4000
    assert (outcome.reason or "").endswith(".py:" + (outcome.reason or "").rpartition(":")[2])
