"""Tests of session metrics, computed by hand. A metric without data has no value."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.metrics import SessionRecord
from headrace_schemas import FunctionCall, Message, Reward, ToolCall, Turn
from tests.support import packages
from tests.support.turns import START, after, ask, feedback, said, user

NAMES = (
    "reward", "success", "missing", "timed_out", "satisfaction", "dissatisfied_follow_ups",
    "tool_errors", "loops", "refusals", "length", "latency", "cost",
)  # fmt: skip
NEVER_ABSTAIN = ("missing", "timed_out")
OWN = """
from headrace_registry.rollouts.metrics import metric

@metric(higher_is_better=True, bounds=(0, 10))
def turns(session):
    return float(len(session.turns))

not_one = 3
"""


def rewarded(source: str, value: float | None = None, at: float = 100.0, **fields: Any) -> Reward:
    reward_fields = {
        "trajectory_id": "t",
        "session_key": "a" * 16,
        "source": source,
        "time": START + timedelta(seconds=at),
    }
    return Reward.model_validate({**reward_fields, "value": value, **fields})


def measured(name: str, *turns: Turn, **events: Any) -> float | None:
    return metrics.metric_named(name).compute(SessionRecord("a" * 16, turns, **events))


def called(*arguments: str) -> Message:
    calls = tuple(
        ToolCall(id=f"c{number}", function=FunctionCall(name="look", arguments=text))
        for number, text in enumerate(arguments)
    )
    return Message(role="assistant", tool_calls=calls)


def with_answers(turn: Turn, *messages: Message) -> Turn:
    """Return `turn` with `messages` as its choices."""
    choices = [
        choice.model_copy(update={"message": message}) for choice, message in zip(turn.choices, messages, strict=True)
    ]
    return turn.model_copy(update={"choices": tuple(choices)})


@pytest.mark.parametrize("name", NAMES)
def test_metric_abstains_without_data(name: str) -> None:
    value = measured(name)
    assert value == ({"missing": 1.0, "timed_out": 0.0}[name] if name in NEVER_ABSTAIN else None)


def test_reward_uses_the_last_revision_by_source_and_in_total() -> None:
    said_so = (
        rewarded("function:answer", 1.0),
        rewarded("judge:help", 0.25),
        rewarded("judge:help", 0.75, revision=1),
        rewarded("judge:tone", outcome="abstained"),
    )
    assert measured("reward:judge:help", rewards=said_so) == 0.75
    assert measured("reward", rewards=said_so) == pytest.approx((1.0 + 0.75) / 2)
    assert measured("reward:judge:tone", rewards=said_so) is None
    assert measured("success", rewards=said_so) == 1.0
    assert measured("success:judge:help", rewards=said_so[:2]) == 0.0
    assert measured("missing:judge:tone", rewards=said_so) == 1.0
    assert measured("missing", rewards=said_so) == 0.0


def test_missing_counts_withdrawn_rewards_and_timed_out_counts_timeouts() -> None:
    withdrawn = (rewarded("feedback", 1.0), rewarded("feedback", revision=1, outcome="withdrawn"))
    assert measured("reward", rewards=withdrawn) is None
    assert measured("missing", rewards=withdrawn) == 1.0
    assert measured("timed_out", rewards=withdrawn) == 0.0
    late = (rewarded("function:slow", outcome="timed_out"),)
    assert (measured("timed_out", rewards=late), measured("missing", rewards=late)) == (1.0, 1.0)
    assert measured("timed_out", rewards=(*late, rewarded("function:slow", 0.5, revision=1))) == 0.0


def test_session_record_as_of_leaves_out_later_events() -> None:
    record = SessionRecord("a" * 16, rewards=(rewarded("f", 0.0, at=10), rewarded("f", 1.0, at=90, revision=1)))
    reward = metrics.metric_named("reward").compute
    rewards = [reward(record.as_of(START + timedelta(seconds=at))) for at in (5, 10, 89, 90)]
    assert rewards == [None, 0.0, 0.0, 1.0]


def test_satisfaction_ignores_edits_and_counts_each_rater() -> None:
    turn = ask([user("q")])
    better = Message(role="assistant", content="better")
    words = (
        feedback("s", turn, value=1.0, rater="ann"),
        feedback("s", turn, value=0.0, rater="bob"),
        feedback("s", turn, value=None, edit=better, rater="ann"),
        feedback("s", turn, value=None, withdrawn=True, kind="edit", rater="ann"),
        feedback("s", turn, value=0.0, metric="tone", rater="ann"),
    )
    assert measured("satisfaction", feedback=words) == 0.5
    assert measured("satisfaction:feedback:tone", feedback=words) == 0.0
    assert (
        measured("satisfaction", feedback=(*words, feedback("s", turn, value=None, withdrawn=True, rater="bob"))) == 1.0
    )


def test_satisfaction_uses_the_last_feedback_on_each_target() -> None:
    turn = ask([user("hi")])
    words = (
        feedback("s", turn, value=0.0),
        feedback("s", turn, value=1.0),
        feedback("s", value=0.5),
        feedback("s", value=0.0, source="rater"),
        feedback("s", value=None),
    )
    assert measured("satisfaction", feedback=words) == pytest.approx(0.75)
    assert measured("satisfaction:rater", feedback=words) == 0.0
    assert measured("satisfaction", feedback=(*words, feedback("s", turn, value=None, withdrawn=True))) == 0.5


@pytest.mark.parametrize(
    ("text", "unhappy"),
    [
        ("No, that is wrong.", True),
        ("that's not what I asked for", True),
        ("It still doesn't work", True),
        ("Please try again", True),
        ("Nobody knows. Thanks, and now the next one", False),
        ("great, thank you", False),
    ],
)
def test_dissatisfied_follow_ups_recognises_complaints(text: str, unhappy: bool) -> None:
    first = ask([user("do it")], "done")
    second = ask(after(first, user(text)), "ok")
    assert measured("dissatisfied_follow_ups", first, second) == float(unhappy)
    assert measured("dissatisfied_follow_ups", first) is None


def test_tool_errors_counts_failed_calls() -> None:
    results = {"c0": '{"error": "no such file"}', "c1": "42", "c3": "Error: gone", "c4": '{"found": "no error"}'}
    turn = with_answers(ask([user("look")]), called("{}", "[1]", "{broken", "{}", "{}"))
    results_sent = [Message(role="tool", content=text, tool_call_id=key) for key, text in results.items()]
    last = ask([*turn.messages, turn.choices[0].message, *results_sent], "so")
    assert measured("tool_errors", turn, last) == pytest.approx(3 / 5)
    assert measured("tool_errors", last) is None
    deep = with_answers(ask([user("look")]), called("[" * 100_000))
    assert measured("tool_errors", deep) == 1.0


def test_loops_needs_three_equal_answers() -> None:
    turn = ask([user("a"), said("x"), user("b"), said("x"), user("c")], "x")
    assert measured("loops", turn) == 1.0
    assert measured("loops", ask([user("a"), said("x"), user("b")], "x")) == 0.0


def test_refusals_is_the_share_of_refusing_answers() -> None:
    turn = ask([user("hi")], "I'm sorry, but I can't help with that.", "Here it is.", "I am sorry for your loss.")
    assert measured("refusals", turn) == pytest.approx(1 / 3)
    assert measured("refusals", with_answers(ask([user("hi")]), called("{}"))) is None


def test_length_latency_and_cost_are_computed_from_turns() -> None:
    first, second = ask([user("hi")], "abc"), ask([user("ho")], "abcdef")
    usage = [turn.usage for turn in (first, second)]
    assert measured("length", first, second) == sum(usage_item.completion_tokens for usage_item in usage)
    assert measured("cost", first, second) == sum(
        usage_item.completion_tokens + usage_item.prompt_tokens for usage_item in usage
    )
    assert measured("latency", first, second) == 1.0


def test_goodness_scales_clips_and_reverses_values() -> None:
    latency = metrics.metric_named("latency")
    assert [latency.goodness(value) for value in (0.0, 15.0, 60.0, 600.0)] == [1.0, 0.75, 0.0, 0.0]
    assert latency.within((0.0, 600.0)).goodness(60.0) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="the lower one comes first"):
        latency.within((1.0, 1.0))


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announces = {"foreign_turns": "foreign_metrics:turns", "broken": "foreign_metrics:not_one"}
    packages.install(tmp_path, "foreign", {"headrace.rollout_metrics": announces}, foreign_metrics=OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("foreign")
def test_metric_named_loads_metrics_of_other_packages() -> None:
    assert measured("foreign_turns", ask([user("hi")])) == 1.0
    assert metrics.metric_named("foreign_turns").goodness(5.0) == 0.5
    with pytest.raises(ValueError, match="foreign_metrics:not_one is not a metric"):
        metrics.metric_named("broken")
    with pytest.raises(ValueError, match="'foreign_turns' has no sources"):
        metrics.metric_named("foreign_turns:x")


def test_metric_named_refuses_unknown_names_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"metric 'rewrad'; did you mean 'reward'\? there are cost, dissatisfied"):
        metrics.metric_named("rewrad:x")


def test_finite_values_without_a_finite_sum_fail_their_metric_by_name() -> None:
    """The mean of two values of 1.7e308 is an `OverflowError`, which would end the registry and not the rollout."""
    huge = metrics.metric(higher_is_better=True)(lambda _session: 1.7e308)
    record = SessionRecord("a" * 16)
    assert metrics.compute_metrics([record], {"huge": huge}) == {"huge": 1.7e308}
    with pytest.raises(metrics.MetricFailed, match="metric huge is up to"):
        metrics.compute_metrics([record, record], {"huge": huge})
