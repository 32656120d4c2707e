from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from email_agent import agent
from email_agent.mailbox import Mailbox
from email_agent.react import TURNS_MAX, play
from email_agent.tasks import Kind
from email_agent.tools import Mailtools
from tests.support.fake_llm import FakeLLM, Reply, completion, status
from tests.support.headrace_in_memory import Headrace

from .clerk_server import Clerk, clueless

KINDS: set[str] = set(Kind.__args__)  # type: ignore[attr-defined]


@pytest.fixture
def headrace(box: Mailbox, tools: Mailtools) -> Headrace:
    return Headrace(Clerk(box, tools))


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"model": "m", "seed": 1, "tasks": 12, "concurrency": 3, "max_tokens": 64, "signal": "rewards", **given}
    )


async def test_every_answer_gets_one_feedback_that_names_its_calls(headrace: Headrace) -> None:
    users = agent.Users(headrace.client(), options())
    await users.ask()
    assert len(headrace.feedback) == 12
    named = [response for one in headrace.feedback for response in one["msg_ids"]]
    assert sorted(named) == sorted(headrace.spoken)
    assert {len(one["msg_ids"]) for one in headrace.feedback} == {3}
    assert {one["task_id"] for one in headrace.feedback} == KINDS
    assert all(one["ends_session"] and one["value"] == 1.0 and one["context"]["expected"] for one in headrace.feedback)
    assert len({one["feedback_id"] for one in headrace.feedback}) == 12


async def test_an_answer_that_is_not_accepted_is_worth_nothing() -> None:
    headrace = Headrace(clueless())
    await agent.Users(headrace.client(), options(tasks=2)).ask()
    assert [one["value"] for one in headrace.feedback] == [0.0, 0.0]


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
    users = agent.Users(headrace.client(), options(tasks=None))
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
