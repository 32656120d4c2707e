from __future__ import annotations

import json
import sys

import pytest

from email_agent import evaluate
from email_agent.mailbox import Mailbox
from email_agent.tasks import tasks
from email_agent.tools import Mailtools
from headrace_registry.gate import parse
from tests.support.fake_llm import Behaviour, FakeLLM, status

from .clerk_server import Clerk, clueless


def run(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    given = {"base-url": llm.base_url, "model": "email-agent@0123456789abcdef", "seed": 1, "concurrency": 4, **options}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["evaluate", *flags])
    evaluate.main()


@pytest.fixture
def clerk(box: Mailbox, tools: Mailtools) -> Behaviour:
    return Clerk(box, tools)


def test_it_prints_a_line_per_held_out_task_that_the_gate_can_read(
    box: Mailbox, clerk: Behaviour, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(clerk) as llm:
        run(llm, monkeypatch, tasks=24)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["score"] for line in lines] == [1] * 24
    assert {line["task"] for line in lines} <= {task.id for task in tasks(box, "held_out")}
    assert {line["calls"] for line in lines} == {3}
    assert len(parse("\n".join(map(json.dumps, lines)).encode())) == 24


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
