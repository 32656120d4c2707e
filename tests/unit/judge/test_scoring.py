"""Oracles worked by hand: weighted means, medians, order swaps, win rates."""

from __future__ import annotations

import pytest

from headrace_judge import scoring
from headrace_judge.rubric import Criterion, Rubric
from headrace_judge.scoring import Judgement
from headrace_judge.verdict import Unreadable, Verdict

RUBRIC = Rubric(
    name="r",
    instructions="Judge.",
    criteria=(Criterion(name="a", description="A?", weight=3), Criterion(name="b", description="B?")),
)


def scores(a: int, b: int, reason: str = "") -> Verdict:
    return Verdict(criteria={"a": a, "b": b}, reason=reason)


ABSTAINS = Verdict(criteria=None, reason="cut off")
UNREADABLE = Unreadable("prose")


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [(1, 1, 0.0), (5, 5, 1.0), (3, 3, 0.5), (5, 1, 0.75), (1, 5, 0.25), (4, 2, (3 * 0.75 + 0.25) / 4)],
)
def test_the_value_is_the_weighted_mean_on_0_to_1(a: int, b: int, value: float) -> None:
    judgement = scoring.single(RUBRIC, [scores(a, b, "so")])
    assert judgement.value == pytest.approx(value)
    assert judgement.criteria == {"a": (a - 1) / 4, "b": (b - 1) / 4}
    assert judgement.reason == "so"


def test_samples_count_by_their_median_per_criterion() -> None:
    judgement = scoring.single(RUBRIC, [scores(5, 1), scores(1, 2), scores(2, 5)])
    assert judgement.criteria == {"a": 0.25, "b": 0.25}
    assert scoring.single(RUBRIC, [scores(1, 1), scores(2, 1)]).criteria["a"] == 0.125


def test_a_minority_of_samples_may_be_missing() -> None:
    assert scoring.single(RUBRIC, [scores(5, 5), UNREADABLE, scores(5, 5)]).value == 1.0
    assert scoring.single(RUBRIC, [scores(5, 5), UNREADABLE]).outcome == "parse_error"
    assert scoring.single(RUBRIC, [scores(5, 5), ABSTAINS, ABSTAINS]).outcome == "abstained"
    assert scoring.single(RUBRIC, [ABSTAINS]) == Judgement(outcome="abstained", reason="the model abstains: cut off")


def test_a_winner_in_both_orders_has_won() -> None:
    judgement = scoring.pair(RUBRIC, [scores(1, -1, "better")], [scores(-1, 1, "worse")])
    assert (judgement.value, judgement.criteria) == (1.0, {"a": 1.0, "b": 0.0})
    assert judgement.reason == "better / worse"
    turned = scoring.swapped(judgement)
    assert (turned.value, turned.criteria) == (0.0, {"a": 0.0, "b": 1.0})


@pytest.mark.parametrize(("forth", "back"), [(1, 1), (-1, -1), (1, 0), (0, -1)])
def test_a_winner_that_depends_on_the_order_is_a_tie(forth: int, back: int) -> None:
    judgement = scoring.pair(RUBRIC, [scores(forth, forth)], [scores(back, back)])
    assert (judgement.outcome, judgement.value, judgement.reason) == ("scored", 0.5, "order")


def test_no_preference_in_both_orders_is_a_tie_of_its_own_kind() -> None:
    assert scoring.pair(RUBRIC, [scores(0, 0)], [scores(0, 0)]).reason == "tie"


def test_weights_decide_between_criteria_and_cancel_exactly() -> None:
    assert scoring.pair(RUBRIC, [scores(1, -1)], [scores(-1, 1)]).value == 1.0
    thirds = RUBRIC.model_copy(
        update={"criteria": tuple(Criterion(name=n, description="?", weight=w) for n, w in [("a", 0.1), ("b", 0.3)])}
    )
    tied = Verdict(criteria={"a": 1, "b": -1}, reason="")
    assert scoring.pair(thirds, [tied], [tied]).reason == "order"


@pytest.mark.parametrize(("bad", "outcome"), [(UNREADABLE, "parse_error"), (ABSTAINS, "abstained")])
def test_a_pair_needs_both_orders(bad: Verdict | Unreadable, outcome: str) -> None:
    assert scoring.pair(RUBRIC, [scores(1, 1)], [bad]).outcome == outcome
    assert scoring.pair(RUBRIC, [bad], [scores(1, 1)]).outcome == outcome
    assert scoring.swapped(scoring.pair(RUBRIC, [bad], [bad])).value is None


def decided(value: float, reason: str = "") -> Judgement:
    return Judgement(outcome="scored", value=value, criteria={"a": value, "b": 1 - value}, reason=reason)


FAILED = Judgement(outcome="failed", reason="the endpoint answered 400")
TIMED_OUT = Judgement(outcome="timed_out", reason="no verdict within 60 s")


def test_the_standing_is_the_win_rate_over_decided_pairs() -> None:
    win_rate = scoring.win_rate([("x", decided(1.0)), ("y", decided(0.5, "order")), ("z", FAILED)], waiting=1)
    assert win_rate is not None
    assert (win_rate.value, win_rate.criteria) == (0.75, {"a": 0.75, "b": 0.25})
    assert win_rate.reason.splitlines()[0] == "win rate over 2 pairs"
    assert "tied against y: order" in win_rate.reason
    assert "failed against z: the endpoint answered 400" in win_rate.reason


def test_there_is_no_standing_before_something_is_decided() -> None:
    assert scoring.win_rate([], waiting=0) is None
    assert scoring.win_rate([("z", FAILED)], waiting=1) is None
    none = scoring.win_rate([("x", TIMED_OUT), ("y", FAILED), ("z", FAILED)], waiting=0)
    assert none is not None
    assert (none.outcome, none.value) == ("failed", None)
    assert none.reason == "none of 3 pairs was decided: the endpoint answered 400"
