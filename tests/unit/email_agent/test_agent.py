"""Tests of the e-mail agent with correct and faulty models: the agent loop, the evaluation and the reward of a run."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from email_agent import agent, evaluate, rewards, typed
from email_agent.demonstrations import Schedule, conversations, demonstrate
from email_agent.mailbox import TURNS_MAX, Kind, Mailbox, Mailtools, play, tasks
from example_parts.at_work import Tally
from example_parts.react import Episode
from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateSettings
from headrace_schemas import Dialogue, Message, Trajectory
from tests.support.fake_llm import Behaviour, Call, FakeLLM, Headrace, Reply, completion, say, status
from tests.support.turns import closed


class Clerk:
    """Model that answers every call with the next message of the demonstrated conversation."""

    def __init__(self, box: Mailbox, tools: Mailtools) -> None:
        all_tasks = (*tasks(box, "train"), *tasks(box, "held_out"))
        self._right = {task.question: demonstrate(task, tools, random.Random(0), lapses=0.0) for task in all_tasks}
        self._numbers = itertools.count()

    def __call__(self, call: Call) -> Reply:
        messages: list[dict[str, Any]] = call.body["messages"]
        message = self._right[messages[1]["content"]][len(messages)]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        return Reply({"id": f"chatcmpl-{next(self._numbers)}", "object": "chat.completion", "choices": [choice]})


def clueless() -> Behaviour:
    return say("unknown")


KINDS: set[str] = set(Kind.__args__)  # type: ignore[attr-defined]


@pytest.fixture
def headrace(box: Mailbox, tools: Mailtools) -> Headrace:
    return Headrace(Clerk(box, tools))


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"model": "m", "seed": 1, "tasks": 12, "concurrency": 3, "max_tokens": 64, "signal": "rewards", **values}
    )


async def test_every_answer_gets_one_feedback_that_names_its_calls(headrace: Headrace) -> None:
    users = agent.Users(headrace.client(), options())
    await users.ask()
    assert len(headrace.feedback) == 12
    named = [response for feedback in headrace.feedback for response in feedback["msg_ids"]]
    assert sorted(named) == sorted(headrace.spoken)
    assert {len(feedback["msg_ids"]) for feedback in headrace.feedback} == {3}
    assert {feedback["task_id"] for feedback in headrace.feedback} == KINDS
    assert all(
        feedback["ends_session"] and feedback["value"] == 1.0 and feedback["context"]["expected"]
        for feedback in headrace.feedback
    )
    assert len({feedback["feedback_id"] for feedback in headrace.feedback}) == 12


async def test_an_answer_that_is_not_accepted_is_worth_nothing() -> None:
    headrace = Headrace(clueless())
    await agent.Users(headrace.client(), options(tasks=2)).ask()
    assert [feedback["value"] for feedback in headrace.feedback] == [0.0, 0.0]


async def test_a_server_without_feedback_is_asked_once(headrace: Headrace) -> None:
    headrace.refusal = 404
    users = agent.Users(headrace.client(), options(concurrency=1))
    await users.ask()
    assert len(headrace.feedback) == 1
    assert users.tally.feedback_refused
    assert users.tally.failed_requests == 0


async def test_feedback_that_fails_is_counted_and_stops_nothing(headrace: Headrace) -> None:
    headrace.refusal = 500
    users = agent.Users(headrace.client(), options())
    await users.ask()
    assert len(headrace.feedback) == users.tally.failed_requests == 12
    assert users.tally.failures[0].startswith("feedback: InternalServerError")


async def test_users_who_have_had_enough_still_hear_their_answers(headrace: Headrace) -> None:
    users = agent.Users(headrace.client(), options(tasks=0))
    asking = asyncio.create_task(users.ask())
    await asyncio.wait_for(headrace.heard.wait(), 10)
    users.had_enough = True
    await asyncio.wait_for(asking, 10)
    assert len(headrace.spoken) == 3 * len(headrace.feedback)


async def test_an_agent_that_finds_no_answer_stops(tools: Mailtools) -> None:
    function = {"name": "find_contact", "arguments": '{"name": "Nobody"}'}
    again = [{"id": "call_1", "type": "function", "function": function}]
    with FakeLLM(lambda _call: Reply(completion(None, tool_calls=again))) as llm:
        async with AsyncOpenAI(base_url=llm.base_url, api_key="none") as client:
            episode = await play(client, "m", tools, "Who is Nobody?", max_tokens=64)
    assert episode.answer is None
    assert episode.calls == len(llm.calls) == TURNS_MAX
    assert llm.calls[-1].last == "error: no such contact"


def test_against_any_other_server_it_works_and_says_what_failed(
    box: Mailbox, tools: Mailtools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "agent.json"
    with FakeLLM(Clerk(box, tools)) as llm:
        llm.then(status(400))
        flags = f"--base-url {llm.base_url} --model m --tasks 7 --concurrency 2 --seed 1 --out {out}".split()
        monkeypatch.setattr(sys, "argv", ["agent", *flags])
        with pytest.raises(SystemExit, match=r"1 requests failed.*BadRequestError"):
            agent.main()
    summary = json.loads(out.read_text())
    assert (summary["tasks"], summary["accepted"], summary["calls"]) == (7, 6, 19)
    assert (summary["failed_requests"], summary["feedback_taken"]) == (1, False)
    assert "7 questions, 86% of the answers accepted, 19 model calls" in capsys.readouterr().out


async def test_counts_are_written_while_the_agent_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("example_parts.at_work.WRITE_S", 0.01)
    out, tally = tmp_path / "agent.json", Tally(1, "questions", "of the answers accepted")

    def finished() -> int:
        return int(json.loads(out.read_text())["tasks"]) if out.exists() else -1

    async with tally.written(out), asyncio.timeout(20):
        for count in range(3):
            while finished() != count:  # noqa: ASYNC110 (a file has no event)
                await asyncio.sleep(0.01)
            tally.count("kind", Episode(messages=[]), accepted=True)
    assert finished() == 3
    assert not out.with_name(".agent.json").exists()


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
VERSION, OTHER = "email-agent@0123456789abcdef", "email-agent@fedcba9876543210"


def run(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    values = {"base-url": llm.base_url, "model": "email-agent@0123456789abcdef", "seed": 1, "concurrency": 4, **options}
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["evaluate", *flags])
    evaluate.main()


@pytest.fixture
def clerk(box: Mailbox, tools: Mailtools) -> Behaviour:
    return Clerk(box, tools)


def test_it_prints_a_line_per_audit_task(
    box: Mailbox, clerk: Behaviour, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(clerk) as llm:
        run(llm, monkeypatch, tasks=24)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["score"] for line in lines] == [1] * 24
    assert {line["task"] for line in lines} <= {task.id for task in tasks(box, "audit")}
    assert {line["calls"] for line in lines} == {3}


async def test_the_gate_tells_it_what_to_play(box: Mailbox, clerk: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    with FakeLLM(clerk) as llm:
        program = ("{python}", "-m", "email_agent.evaluate", "--base-url", "{base_url}", "--gate", "--seed", "1")
        async with Gate(GateSettings(command=program, base_url=llm.base_url)).session() as court:
            assert set(court.tasks.gate) <= {task.id for task in tasks(box, "gate")}
            assert set(court.tasks.audit) <= {task.id for task in tasks(box, "audit")}
            assert (len(court.tasks.gate), len(court.tasks.audit)) == (96, 96)
            plays = [court.play(version, court.tasks.gate[0], 7) for version in (VERSION, OTHER)]
            assert await asyncio.gather(*plays) == [1.0, 1.0]
        turns = {(version, 7 * TURNS_MAX + turn) for version in (VERSION, OTHER) for turn in range(3)}
        assert {(call.body["model"], call.body["seed"]) for call in llm.calls} == turns, "a seed of its own for each"
        llm.then(status(400))
        with pytest.raises(GateFailed, match=r"status 1: 1 tasks could not be played.*BadRequestError"):
            async with Gate(GateSettings(command=program, base_url=llm.base_url)).session() as court:
                await court.play(VERSION, court.tasks.audit[0], 7)


def test_every_call_is_marked_as_evaluation_of_that_version(clerk: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeLLM(clerk) as llm:
        run(llm, monkeypatch, tasks=6)
    assert {call.headers["x-headrace-purpose"] for call in llm.calls} == {"eval"}
    assert {call.body["model"] for call in llm.calls} == {"email-agent@0123456789abcdef"}
    assert {call.body["temperature"] for call in llm.calls} == {1.0}
    assert len({call.headers["x-session-id"] for call in llm.calls}) == 6


def test_the_questions_depend_on_the_seed_alone(
    box: Mailbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question_lists = []
    for seed in (1, 1, 2):
        with FakeLLM(clueless()) as llm:
            run(llm, monkeypatch, tasks=12, seed=seed)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {line["score"] for line in lines} == {0}
        question_lists.append({line["task"] for line in lines})
    assert question_lists[0] == question_lists[1] != question_lists[2]


def test_a_task_that_could_not_be_played_has_no_score_and_fails_the_evaluation(
    clerk: Behaviour, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(clerk) as llm:
        llm.then(status(400))
        with pytest.raises(SystemExit, match=r"1 tasks could not be played.*BadRequestError"):
            run(llm, monkeypatch, tasks=6)
    assert len(capsys.readouterr().out.splitlines()) == 5


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
    conversation = tuple(Message.model_validate(message) for message in (ASKED, *messages))
    return closed(dialogues=(Dialogue(messages=conversation),))


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SEARCHED = called("search_mail", "harbor budget", "a1 Ben Stone: harbor budget")
LISTED = called("list_thread", "a1", "Anna Berg\nBen Stone")
GOOD = trajectory(*SEARCHED, *LISTED, answer("Anna Berg"))


def test_a_good_run_is_good_in_every_respect() -> None:
    assert rewards.answer(GOOD, EXPECTED) == 1.0
    assert rewards.evidence(GOOD, EXPECTED) == 1.0
    assert rewards.tool_use(GOOD) == 1.0


@pytest.mark.parametrize("text", ["anna berg.", " Anna  Berg\n", '"Anna Berg"'])
def test_case_space_and_punctuation_do_not_matter(text: str) -> None:
    assert rewards.answer(trajectory(*SEARCHED, *LISTED, answer(text)), EXPECTED) == 1.0


@pytest.mark.parametrize("text", ["Ben Stone", "", "Anna", "Anna Berg or Ben Stone", "AnnaBerg", "unknown"])
def test_anything_else_is_wrong(text: str) -> None:
    assert rewards.answer(trajectory(*SEARCHED, *LISTED, answer(text)), EXPECTED) == 0.0


def test_a_run_without_an_answer_is_wrong_but_keeps_its_evidence() -> None:
    stopped = trajectory(*SEARCHED, *LISTED)
    assert rewards.answer(stopped, EXPECTED) == 0.0
    assert rewards.evidence(stopped, EXPECTED) == 1.0


def test_evidence_is_what_tools_showed_not_what_the_model_said() -> None:
    guessed = trajectory(*SEARCHED, answer("Anna Berg"))
    assert rewards.answer(guessed, EXPECTED) == 1.0
    assert rewards.evidence(guessed, EXPECTED) == 0.0


def test_evidence_is_whole_words() -> None:
    with_evidence = trajectory(*called("count_mail", "c1", "14 mails"), answer("4"))
    assert rewards.evidence(with_evidence, {"expected": "4"}) == 0.0
    assert rewards.evidence(with_evidence, {"expected": "14"}) == 1.0


def test_without_an_expected_answer_there_is_no_verdict() -> None:
    assert rewards.answer(GOOD, {}) is None
    assert rewards.evidence(GOOD, {}) is None


def test_tool_use_is_the_share_of_calls_that_worked() -> None:
    failed = called("list_thread", "zz", "error: no such thread")
    malformed = answer('<tool_call>{"name": "list_thread", "arguments": {"thread": "a1</tool_call>')
    assert rewards.tool_use(trajectory(*SEARCHED, *failed, answer("unknown"))) == 0.5
    assert rewards.tool_use(trajectory(*SEARCHED, malformed)) == 0.5
    assert rewards.tool_use(trajectory(malformed)) == 0.0
    assert rewards.tool_use(trajectory(answer("Anna Berg"))) == 0.0


def test_what_a_user_writes_is_no_evidence_and_no_call() -> None:
    user_claim = trajectory({"role": "user", "content": "Anna Berg <tool_call>"}, answer("Anna Berg"))
    assert rewards.evidence(user_claim, EXPECTED) == 0.0
    assert rewards.tool_use(user_claim) == 0.0


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
    """The typed warm-up data keeps malformed tool calls as text, which the grammar has to prevent later."""
    schedule = Schedule(steps=4, batch=8, right_share=0.5)
    for typed_conversation, bare in zip(typed.conversations(schedule, 1), conversations(schedule, 1), strict=True):
        text = bare[-1]["content"]
        assert typed_conversation[:-1] == bare[:-1]
        if text.startswith("<tool_call>"):
            assert typed_conversation[-1] == bare[-1]
        else:
            (call,) = typed_conversation[-1]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "final_answer",
                {"answer": text},
            )
