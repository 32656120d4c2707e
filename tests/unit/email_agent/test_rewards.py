from __future__ import annotations

import json
from typing import Any

import pytest

from email_agent import rewards, typed
from email_agent.warm_up import Schedule, conversations
from headrace_schemas import Dialogue, Message, Trajectory
from tests.support.trajectories import closed

EXPECTED: dict[str, object] = {"expected": "Anna Berg"}
ASKED = {"role": "user", "content": "Who wrote last about harbor budget?"}


def called(name: str, argument: str, result: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": json.dumps({"thread": argument})}
    calls = [{"id": name, "type": "function", "function": function}]
    return [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": name, "content": result},
    ]


def trajectory(*messages: dict[str, Any]) -> Trajectory:
    spoken = tuple(Message.model_validate(message) for message in (ASKED, *messages))
    return closed(dialogues=(Dialogue(messages=spoken),))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SEARCHED = called("search_mail", "harbor budget", "a1 Ben Stone: harbor budget")
LISTED = called("list_thread", "a1", "Anna Berg\nBen Stone")
GOOD = trajectory(*SEARCHED, *LISTED, said("Anna Berg"))


def test_a_good_run_is_good_in_every_respect() -> None:
    assert rewards.answer(GOOD, EXPECTED) == 1.0
    assert rewards.evidence(GOOD, EXPECTED) == 1.0
    assert rewards.tool_use(GOOD) == 1.0


@pytest.mark.parametrize("text", ["anna berg.", " Anna  Berg\n", '"Anna Berg"'])
def test_case_space_and_punctuation_do_not_matter(text: str) -> None:
    assert rewards.answer(trajectory(*SEARCHED, *LISTED, said(text)), EXPECTED) == 1.0


@pytest.mark.parametrize("text", ["Ben Stone", "", "Anna", "Anna Berg or Ben Stone", "AnnaBerg", "unknown"])
def test_anything_else_is_wrong(text: str) -> None:
    assert rewards.answer(trajectory(*SEARCHED, *LISTED, said(text)), EXPECTED) == 0.0


def test_a_run_without_an_answer_is_wrong_but_keeps_its_evidence() -> None:
    stopped = trajectory(*SEARCHED, *LISTED)
    assert rewards.answer(stopped, EXPECTED) == 0.0
    assert rewards.evidence(stopped, EXPECTED) == 1.0


def test_evidence_is_what_tools_showed_not_what_the_model_said() -> None:
    guessed = trajectory(*SEARCHED, said("Anna Berg"))
    assert rewards.answer(guessed, EXPECTED) == 1.0
    assert rewards.evidence(guessed, EXPECTED) == 0.0


def test_evidence_is_whole_words() -> None:
    shown = trajectory(*called("count_mail", "c1", "14 mails"), said("4"))
    assert rewards.evidence(shown, {"expected": "4"}) == 0.0
    assert rewards.evidence(shown, {"expected": "14"}) == 1.0


def test_without_an_expected_answer_there_is_no_verdict() -> None:
    assert rewards.answer(GOOD, {}) is None
    assert rewards.evidence(GOOD, {}) is None


def test_tool_use_is_the_share_of_calls_that_worked() -> None:
    failed = called("list_thread", "zz", "error: no such thread")
    malformed = said('<tool_call>{"name": "list_thread", "arguments": {"thread": "a1</tool_call>')
    assert rewards.tool_use(trajectory(*SEARCHED, *failed, said("unknown"))) == 0.5
    assert rewards.tool_use(trajectory(*SEARCHED, malformed)) == 0.5
    assert rewards.tool_use(trajectory(malformed)) == 0.0
    assert rewards.tool_use(trajectory(said("Anna Berg"))) == 0.0


def test_what_a_user_writes_is_no_evidence_and_no_call() -> None:
    told = trajectory({"role": "user", "content": "Anna Berg <tool_call>"}, said("Anna Berg"))
    assert rewards.evidence(told, EXPECTED) == 0.0
    assert rewards.tool_use(told) == 0.0


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        ({"name": "final_answer", "arguments": '{"answer": "anna berg"}'}, 1.0),
        ({"name": "final_answer", "arguments": '{"answer": "Ben Stone"}'}, 0.0),
        ({"name": "final_answer", "arguments": '{"answer": "Anna Berg"'}, 0.0),
        ({"name": "read_mail", "arguments": '{"answer": "Anna Berg"}'}, 0.0),
    ],
)
def test_a_typed_answer_is_the_argument_of_the_last_call(last: dict[str, str], reward: float) -> None:
    call = {"id": "last", "type": "function", "function": last}
    run = trajectory(*SEARCHED, {"role": "assistant", "tool_calls": [call]})
    assert typed.answer(run, EXPECTED) == reward
    assert typed.answer(GOOD, EXPECTED) == 0.0


def test_the_warm_up_of_typed_answers_ends_with_the_same_answers() -> None:
    """Malformed calls stay text, so that the grammar has something to prevent."""
    schedule = Schedule(steps=4, batch=8, right_share=0.5)
    for shown, bare in zip(typed.conversations(schedule, 1), conversations(schedule, 1), strict=True):
        text = bare[-1]["content"]
        assert shown[:-1] == bare[:-1]
        if text.startswith("<tool_call>"):
            assert shown[-1] == bare[-1]
        else:
            (call,) = shown[-1]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "final_answer",
                {"answer": text},
            )
