"""What traffic says by itself, and what that is worth: each signal by hand, the calibration against a plain search."""

from __future__ import annotations

import itertools
import json
import random
from importlib.metadata import entry_points
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rewards import Calibration, hints, signals
from headrace.rewards.natural_signals import GROUP, exchanges
from headrace_schemas import Branch, Dialogue, FunctionCall, Message, Span, ToolCall, Trajectory
from tests.support.trajectories import closed
from tests.support.turns import VERSION


def user(text: str) -> Message:
    return Message(role="user", content=text)


def model(text: str = "", *calls: str) -> Message:
    made = tuple(ToolCall(id=f"c{n}", function=FunctionCall(name="look", arguments=one)) for n, one in enumerate(calls))
    return Message(role="assistant", content=text or None, tool_calls=made or None)


def tool(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="c0")


def run(*messages: Message, sampled: int | None = None) -> Trajectory:
    """The last `sampled` answers are the model's own turns, t0, t1 and so on."""
    answers = sum(one.role == "assistant" for one in messages)
    turns = [f"t{number}" for number in range(answers if sampled is None else sampled)]
    spans = [Span(start=2 * at, logprobs=(-0.5,), turn_id=turn, version=VERSION) for at, turn in enumerate(turns)]
    branch = Branch(token_ids=tuple(range(1, 2 * len(turns) + 2)), spans=tuple(spans))
    return closed().model_copy(update={"branches": (branch,), "dialogues": (Dialogue(messages=messages),)})


def found(*messages: Message, **context: Any) -> dict[str, list[tuple[str | None, float]]]:
    made: dict[str, list[tuple[str | None, float]]] = {}
    for one in hints(run(*messages), context):
        made.setdefault(one.signal, []).append((one.turn_id, one.value))
    return made


def test_the_signals_are_those_that_packages_announce() -> None:
    assert {"corrected", "left", "looped", "repeated", "thanked", "tool_failed", "used"} <= {
        point.name for point in entry_points(group=GROUP)
    }


@pytest.mark.parametrize(
    "reply",
    [
        "No, I meant Friday.",
        "that is wrong",
        "That's not what I asked for",
        "Wrong invoice.",
        "You forgot the date",
        "it doesn't work",
        "I said Rotterdam",
    ],
)
def test_a_correction_speaks_against_the_turn_before(reply: str) -> None:
    assert found(user("q"), model("a"), user(reply), model("b"))["corrected"] == [("t0", 0.0)]


@pytest.mark.parametrize(
    "reply", ["No problem, go on", "And the other one?", "Is it not on Friday?", "Now send it to Ada", "Thanks a lot"]
)
def test_what_goes_on_is_no_correction(reply: str) -> None:
    assert "corrected" not in found(user("q"), model("a"), user(reply), model("b"))


def test_thanks_speak_for_it_unless_they_come_with_a_correction() -> None:
    assert found(user("q"), model("a"), user("Perfect, thank you!"))["thanked"] == [("t0", 1.0)]
    assert "thanked" not in found(user("q"), model("a"), user("Thanks, but that is wrong"))


def test_a_question_that_comes_again_was_not_answered() -> None:
    asked = "Who sent the invoice of last Monday?"
    assert found(user(asked), model("a"), user("who sent the invoice of last monday"))["repeated"] == [("t0", 0.0)]
    assert "repeated" not in found(user(asked), model("a"), user("When was it paid?"))


def test_tools_that_fail_and_calls_that_come_again() -> None:
    said = found(
        user("q"),
        model("", json.dumps({"a": 1, "b": 2})),
        tool("Error: no such table"),
        model("", json.dumps({"b": 2, "a": 1})),
        tool("42"),
        model("It is 42."),
    )
    assert said == {"tool_failed": [("t0", 0.0), ("t1", 1.0)], "looped": [("t1", 0.0)]}


def test_who_left_without_an_answer() -> None:
    assert found(user("q"), model("", "{}"))["left"] == [(None, 0.0)]
    assert found(user("q"), model("a"), user("and then?"))["left"] == [(None, 0.0)]
    assert "left" not in found(user("q"), model("a"))


def test_how_much_of_the_answer_was_used() -> None:
    assert found(user("q"), model("Dear Ada, it is paid."), used="Dear Ada, it is paid.")["used"] == [(None, 1.0)]
    ((_, some),) = found(user("q"), model("Dear Ada, it is paid."), used="Dear Ada, we never got it.")["used"]
    assert 0.3 < some < 0.7


def test_calls_that_worked_do_not_outvote_the_user() -> None:
    looked = [one for number in range(9) for one in (model("", json.dumps({"a": number})), tool("42"))]
    told = {"": 1.0, "No, that is wrong.": 0.5, "Thank you!": 1.0}
    for reply, value in told.items():
        said = [user(reply), model("b")] if reply else []
        assert signals(run(user("q"), *looked, model("a"), *said), {}).value == value


def test_what_the_client_brought_is_no_turn() -> None:
    brought = run(user("q"), model("from elsewhere"), user("no, wrong"), model("a"), user("thanks"), sampled=1)
    assert [(one.turn_id, one.answer.text) for one in exchanges(brought)] == [("t0", "a")]
    assert [one.signal for one in hints(brought, {})] == ["left", "thanked"]


def test_hints_are_a_reward_of_run_and_turns_and_silence_is_none() -> None:
    talk = run(user("q"), model("a"), user("no, wrong"), model("b"), user("thanks"), model("welcome"))
    result = signals(talk, {})
    assert (result.value, result.turns) == (0.5, {"t0": 0.0, "t1": 1.0})
    assert result.criteria == {"corrected": 0.0, "thanked": 1.0}
    assert signals(run(user("q"), model("a")), {}).value is None
    assert signals(closed().model_copy(update={"dialogues": ()}), {}).value is None


def brute(pairs: list[tuple[float, float]]) -> dict[float, float]:
    """The isotonic fit, by its definition: max over beginnings, min over ends, of the means between them."""
    scores = sorted({score for score, _ in pairs})
    means = {}
    for at in range(len(scores)):
        below = []
        for begin in range(at + 1):
            ends = []
            for end in range(at, len(scores)):
                some = [said for score, said in pairs if scores[begin] <= score <= scores[end]]
                ends.append(sum(some) / len(some))
            below.append(min(ends))
        means[scores[at]] = max(below)
    return means


_TENTHS = st.integers(0, 10).map(lambda tenth: tenth / 10)


@given(st.lists(st.tuples(_TENTHS, _TENTHS), min_size=1, max_size=25))
def test_the_fit_is_the_isotonic_one(pairs: list[tuple[float, float]]) -> None:
    made = Calibration(pairs, count_min=1, width_max=1.0)
    for score, mean in brute(pairs).items():
        one = made.calibrated(score)
        assert one is not None
        assert one.value == pytest.approx(mean)
        assert one.low <= one.value + 1e-12
        assert one.high >= one.value - 1e-12


@given(st.lists(st.tuples(_TENTHS, _TENTHS), min_size=1, max_size=25))
def test_more_is_never_worth_less(pairs: list[tuple[float, float]]) -> None:
    made = Calibration(pairs, count_min=1, width_max=1.0)
    values = [one.value for tenth in range(11) if (one := made.calibrated(tenth / 10)) is not None]
    assert all(one <= other + 1e-12 for one, other in itertools.pairwise(values))


def test_it_abstains_where_few_have_spoken_or_they_disagree() -> None:
    assert Calibration([]).calibrated(0.5) is None
    assert Calibration([(0.5, 1.0)] * 9).calibrated(0.5) is None
    assert Calibration([(0.5, 1.0)] * 10).calibrated(0.5) is not None
    split = [(0.5, 0.0), (0.5, 1.0)] * 5
    assert Calibration(split, width_max=0.4).calibrated(0.5) is None
    assert Calibration(split * 10, width_max=0.4).calibrated(0.5) is not None


def test_the_interval_holds_as_often_as_it_says() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        pairs = [(0.5, float(draw.random() < 0.7)) for _ in range(40)]
        one = Calibration(pairs, confidence=0.9).calibrated(0.5)
        held += one is not None and one.low <= 0.7 <= one.high
    assert 0.86 < held / 400 < 0.97


def test_what_is_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Calibration([(0.5, 2.0)])
