"""Tests of implicit feedback signals, computed by hand, and of their calibration, compared with an exhaustive
search."""

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
from tests.support.turns import VERSION, closed


def user(text: str) -> Message:
    return Message(role="user", content=text)


def model(text: str = "", *calls: str) -> Message:
    tool_calls = tuple(
        ToolCall(id=f"c{n}", function=FunctionCall(name="look", arguments=arguments))
        for n, arguments in enumerate(calls)
    )
    return Message(role="assistant", content=text or None, tool_calls=tool_calls or None)


def tool(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="c0")


def run(*messages: Message, sampled: int | None = None) -> Trajectory:
    """Return a trajectory whose last `sampled` answers are the model's own turns `t0`, `t1` and so on."""
    answers = sum(message.role == "assistant" for message in messages)
    turns = [f"t{number}" for number in range(answers if sampled is None else sampled)]
    spans = [Span(start=2 * at, logprobs=(-0.5,), turn_id=turn, version=VERSION) for at, turn in enumerate(turns)]
    branch = Branch(token_ids=tuple(range(1, 2 * len(turns) + 2)), spans=tuple(spans))
    return closed().model_copy(update={"branches": (branch,), "dialogues": (Dialogue(messages=messages),)})


def hints_of(*messages: Message, **context: Any) -> dict[str, list[tuple[str | None, float]]]:
    hints_by_signal: dict[str, list[tuple[str | None, float]]] = {}
    for hint in hints(run(*messages), context):
        hints_by_signal.setdefault(hint.signal, []).append((hint.turn_id, hint.value))
    return hints_by_signal


def test_the_signals_are_those_that_packages_announce() -> None:
    assert {"corrected", "left", "looped", "repeated", "thanked", "tool_failed", "used"} <= {
        point.name for point in entry_points(group=GROUP)
    }


@pytest.mark.parametrize(
    "reply",
    [
        "No, I meant Friday.", "that is wrong", "That's not what I asked for", "Wrong invoice.", "You forgot the date",
        "it doesn't work", "I said Rotterdam",
    ],
)  # fmt: skip
def test_a_correction_speaks_against_the_turn_before(reply: str) -> None:
    assert hints_of(user("q"), model("a"), user(reply), model("b"))["corrected"] == [("t0", 0.0)]


@pytest.mark.parametrize(
    "reply", ["No problem, go on", "And the other one?", "Is it not on Friday?", "Now send it to Ada", "Thanks a lot"]
)
def test_continuing_message_is_no_correction(reply: str) -> None:
    assert "corrected" not in hints_of(user("q"), model("a"), user(reply), model("b"))


def test_thanks_speak_for_it_unless_they_come_with_a_correction() -> None:
    assert hints_of(user("q"), model("a"), user("Perfect, thank you!"))["thanked"] == [("t0", 1.0)]
    assert "thanked" not in hints_of(user("q"), model("a"), user("Thanks, but that is wrong"))


def test_a_question_that_comes_again_was_not_answered() -> None:
    question = "Who sent the invoice of last Monday?"
    assert hints_of(user(question), model("a"), user("who sent the invoice of last monday"))["repeated"] == [
        ("t0", 0.0)
    ]
    assert "repeated" not in hints_of(user(question), model("a"), user("When was it paid?"))


def test_tools_that_fail_and_calls_that_come_again() -> None:
    hints_by_signal = hints_of(
        user("q"),
        model("", json.dumps({"a": 1, "b": 2})),
        tool("Error: no such table"),
        model("", json.dumps({"b": 2, "a": 1})),
        tool("42"),
        model("It is 42."),
    )
    assert hints_by_signal == {"tool_failed": [("t0", 0.0), ("t1", 1.0)], "looped": [("t1", 0.0)]}


def test_run_without_an_answer_is_left() -> None:
    assert hints_of(user("q"), model("", "{}"))["left"] == [(None, 0.0)]
    assert hints_of(user("q"), model("a"), user("and then?"))["left"] == [(None, 0.0)]
    assert "left" not in hints_of(user("q"), model("a"))


def test_how_much_of_the_answer_was_used() -> None:
    assert hints_of(user("q"), model("Dear Ada, it is paid."), used="Dear Ada, it is paid.")["used"] == [(None, 1.0)]
    ((_, some),) = hints_of(user("q"), model("Dear Ada, it is paid."), used="Dear Ada, we never got it.")["used"]
    assert 0.3 < some < 0.7


def test_calls_that_worked_do_not_outvote_the_user() -> None:
    looked = [message for number in range(9) for message in (model("", json.dumps({"a": number})), tool("42"))]
    expected = {"": 1.0, "No, that is wrong.": 0.5, "Thank you!": 1.0}
    for reply, value in expected.items():
        reply_messages = [user(reply), model("b")] if reply else []
        assert signals(run(user("q"), *looked, model("a"), *reply_messages), {}).value == value


def test_messages_of_the_client_are_no_turns() -> None:
    brought = run(user("q"), model("from elsewhere"), user("no, wrong"), model("a"), user("thanks"), sampled=1)
    assert [(exchange.turn_id, exchange.answer.text) for exchange in exchanges(brought)] == [("t0", "a")]
    assert [hint.signal for hint in hints(brought, {})] == ["left", "thanked"]


def test_hints_are_a_reward_of_run_and_turns_and_silence_is_none() -> None:
    talk = run(user("q"), model("a"), user("no, wrong"), model("b"), user("thanks"), model("welcome"))
    result = signals(talk, {})
    assert (result.value, result.turns) == (0.5, {"t0": 0.0, "t1": 1.0})
    assert result.criteria == {"corrected": 0.0, "thanked": 1.0}
    assert signals(run(user("q"), model("a")), {}).value is None
    assert signals(closed().model_copy(update={"dialogues": ()}), {}).value is None


def brute(pairs: list[tuple[float, float]]) -> dict[float, float]:
    """Return the isotonic fit by its definition: the maximum over starts of the minimum over ends of the mean in
    between."""
    scores = sorted({score for score, _ in pairs})
    means = {}
    for at in range(len(scores)):
        below = []
        for begin in range(at + 1):
            ends = []
            for end in range(at, len(scores)):
                some = [value for score, value in pairs if scores[begin] <= score <= scores[end]]
                ends.append(sum(some) / len(some))
            below.append(min(ends))
        means[scores[at]] = max(below)
    return means


_TENTHS = st.integers(0, 10).map(lambda tenth: tenth / 10)


@given(st.lists(st.tuples(_TENTHS, _TENTHS), min_size=1, max_size=25))
def test_calibration_is_the_isotonic_fit(pairs: list[tuple[float, float]]) -> None:
    calibration = Calibration(pairs, count_min=1, width_max=1.0)
    for score, mean in brute(pairs).items():
        calibrated = calibration.calibrated(score)
        assert calibrated is not None
        assert calibrated.value == pytest.approx(mean)
        assert calibrated.low <= calibrated.value + 1e-12
        assert calibrated.high >= calibrated.value - 1e-12


@given(st.lists(st.tuples(_TENTHS, _TENTHS), min_size=1, max_size=25))
def test_calibration_is_monotonic(pairs: list[tuple[float, float]]) -> None:
    calibration = Calibration(pairs, count_min=1, width_max=1.0)
    values = [point.value for tenth in range(11) if (point := calibration.calibrated(tenth / 10)) is not None]
    assert all(value <= following + 1e-12 for value, following in itertools.pairwise(values))


def test_calibration_abstains_with_few_or_contradicting_values() -> None:
    assert Calibration([]).calibrated(0.5) is None
    assert Calibration([(0.5, 1.0)] * 9).calibrated(0.5) is None
    assert Calibration([(0.5, 1.0)] * 10).calibrated(0.5) is not None
    split = [(0.5, 0.0), (0.5, 1.0)] * 5
    assert Calibration(split, width_max=0.4).calibrated(0.5) is None
    assert Calibration(split * 10, width_max=0.4).calibrated(0.5) is not None


def test_calibration_interval_has_its_coverage() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(400):
        pairs = [(0.5, float(draw.random() < 0.7)) for _ in range(40)]
        calibrated = Calibration(pairs, confidence=0.9).calibrated(0.5)
        covered += calibrated is not None and calibrated.low <= 0.7 <= calibrated.high
    assert 0.86 < covered / 400 < 0.97


def test_values_outside_of_0_to_1_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Calibration([(0.5, 2.0)])
