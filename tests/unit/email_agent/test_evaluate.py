from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from email_agent import evaluate
from email_agent.mailbox import Mailbox
from email_agent.react import TURNS_MAX
from email_agent.tasks import tasks
from email_agent.tools import Mailtools
from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateSettings
from tests.support.fake_llm import Behaviour, FakeLLM, status

from .clerk_server import Clerk, clueless

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
VERSION, OTHER = "email-agent@0123456789abcdef", "email-agent@fedcba9876543210"


def run(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    given = {"base-url": llm.base_url, "model": "email-agent@0123456789abcdef", "seed": 1, "concurrency": 4, **options}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
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
            asked = [court.play(version, court.tasks.gate[0], 7) for version in (VERSION, OTHER)]
            assert await asyncio.gather(*asked) == [1.0, 1.0]
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
    asked = []
    for seed in (1, 1, 2):
        with FakeLLM(clueless()) as llm:
            run(llm, monkeypatch, tasks=12, seed=seed)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {line["score"] for line in lines} == {0}
        asked.append({line["task"] for line in lines})
    assert asked[0] == asked[1] != asked[2]


def test_a_task_that_could_not_be_played_has_no_score_and_fails_the_evaluation(
    clerk: Behaviour, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(clerk) as llm:
        llm.then(status(400))
        with pytest.raises(SystemExit, match=r"1 tasks could not be played.*BadRequestError"):
            run(llm, monkeypatch, tasks=6)
    assert len(capsys.readouterr().out.splitlines()) == 5
