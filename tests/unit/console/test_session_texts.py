"""Tests of the texts on a session's page: messages that a turn adds, and reasons for missing experiences."""

from __future__ import annotations

import pytest

from headrace_console.pages.session import describe_absence, message_values, new_messages, reward_values
from headrace_console.read_model.training_queries import Runs
from headrace_schemas import Message, Reward
from headrace_schemas.events.chat import FunctionCall, ToolCall
from tests.support.account_events import KEY, START, turn


@pytest.mark.parametrize(
    ("statuses", "sentence"),
    [
        (("waiting/session",), "No experience yet: the session is open."),
        (("dropped/eval", "waiting/reward"), "No experience yet: its reward is awaited."),
        (
            ("dropped/eval", "dropped/eval"),
            "No experience: the turns were dropped (eval). "
            "The call was an evaluation (purpose eval), which is never trained.",
        ),
        (("dropped/truncated_sampling (grammar)",), "call with temperature=1 and without top_p and top_k."),
        ((), "No experience yet."),
    ],
)
def test_absence_of_an_experience_is_explained_by_the_turns(statuses: tuple[str, ...], sentence: str) -> None:
    assert describe_absence(statuses).endswith(sentence)


@pytest.mark.parametrize(
    ("content", "calls", "kind"),
    [("x", False, "answer"), ("x", True, "answer and tool call"), (None, True, "tool call")],
)
def test_answer_with_tool_calls_is_named_so(content: str | None, kind: str, *, calls: bool) -> None:
    call = ToolCall(id="c", function=FunctionCall(name="look_up", arguments="{}"))
    message = Message(role="assistant", content=content, tool_calls=(call,) if calls else None)
    assert message_values(message)["kind"] == kind


def test_new_messages_are_those_that_the_turn_before_lacks() -> None:
    user, agent, again = (Message(role=role, content=text) for role, text in
                          (("user", "a"), ("assistant", "x"), ("user", "b")))  # fmt: skip
    first = turn("a", messages=(user,))
    assert new_messages(turn("b", messages=(user, agent, again)), first) == (again,)
    assert new_messages(turn("b", messages=(again,)), first) == (again,)
    assert new_messages(first, None) == (user,)


def test_reward_names_its_run_and_its_reason() -> None:
    row = {
        "source": 1, "outcome": 2, "value": None, "revision": 0, "turn": 0, "at_ms": 0, "partition": 0, "log_offset": 5,
        "trajectory": 7,
    }  # fmt: skip
    texts = {1: "judge:help", 2: "abstained"}
    record = Reward(time=START, trajectory_id="T", session_key=KEY, source="judge:help", outcome="abstained")
    record = record.model_copy(update={"reason": "no answer"})
    values = reward_values(row, {(0, 5): record}, texts, Runs({1: 1, 3: 2}, {6: 1, 7: 3}, 2))
    assert (values["run"], values["first_turn"], values["reason"]) == (2, 3, "no answer")
    assert reward_values(row, {}, texts, Runs({}, {}, 0))["run"] is None, "its run was not read"
