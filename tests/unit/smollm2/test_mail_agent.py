"""Tests of the mail agent: its tasks, reward, simulated users, held-out runs and settings."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace_cli.demo import recipe
from headrace_registry.settings import GateSettings
from headrace_schemas import Dialogue, Message
from headrace_scorer.functions.loading import FunctionLoader
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from smollm2 import agent, evaluate
from smollm2.base import BASE
from smollm2.mails import ANSWERS, SPLITS, Split, Task, stream
from smollm2.rewards import right
from tests.support.fake_llm import Call, FakeLLM, Headrace, Reply, completion
from tests.support.turns import closed

EXAMPLES = Path(__file__).parents[3] / "examples"


FOLDER = EXAMPLES / "smollm2"
VERSION = "mail-agent@0123456789abcdef"


def tasks(split: Split, count: int, seed: int = 0) -> list[Task]:
    return list(itertools.islice(stream(split, seed), count))


def reader(call: Call) -> Reply:
    """Return the right answer, with an extra word in answers about day and time."""
    mails = {task.messages[2]["content"]: task for split in SPLITS for task in tasks(split, 60)}
    task = mails[call.body["messages"][2]["content"]]
    return Reply(completion(f"On {task.expected}" if task.kind == "Day and time?" else task.expected))


def test_splits_share_no_mail_and_ask_each_question_equally_often() -> None:
    mails = {split: {task.mail for task in tasks(split, 400)} for split in SPLITS}
    for first, second in itertools.combinations(SPLITS, 2):
        assert not mails[first] & mails[second]
    for split in SPLITS:
        kinds = [task.kind for task in tasks(split, 400)]
        assert {kinds.count(kind) for kind in ANSWERS} == {100}
    assert tasks("audit", 20) == tasks("audit", 20) != tasks("audit", 20, seed=1)


def test_the_mail_has_both_facts_once_and_the_example_has_others() -> None:
    for task in tasks("train", 400):
        example, answer, question = (message["content"] for message in task.messages)
        facts = task.expected.split(", ")
        assert [task.mail.count(fact) for fact in facts] == [1, 1]
        assert question == f"{task.mail}\n\n{task.kind}"
        assert all(fact in example for fact in answer.split(", "))
        assert task.expected not in example


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Mia Novak, Friday", 1.0), (" Mia Novak, Friday\n", 1.0), ("Mia Novak, Friday.", 0.0), ("Mia Novak", 0.0),
        ("mia novak, friday", 0.0), ("It is Mia Novak, Friday", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_exactly_the_wanted_answer_is_rewarded(answer: str, reward: float) -> None:
    message = Message(role="assistant", content=answer)
    trajectory = closed(dialogues=(Dialogue(messages=(Message(role="user", content="Who, when?"), message)),))
    assert right(trajectory, {"expected": "Mia Novak, Friday"}) == reward
    assert right(trajectory, {}) is None


async def test_users_send_the_wanted_answer_and_no_reward() -> None:
    headrace = Headrace(reader)
    options = argparse.Namespace(model="m", seed=0, tasks=12, concurrency=3, max_tokens=64)
    users = agent.Users(headrace.client(), options)
    await users.ask()
    sent = sorted((body["task_id"], body["context"]["expected"]) for body in headrace.feedback)
    assert sent == sorted((task.kind, task.expected) for task in tasks("train", 12))
    assert all(body["ends_session"] and "value" not in body for body in headrace.feedback)
    assert "12 questions, 75% of the answers accepted, 12 model calls" in users.tally.line()


def test_held_out_plays_score_exact_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(reader) as llm:
        arguments = ["evaluate", "--base-url", llm.base_url, "--model", VERSION, "--tasks", "20"]
        monkeypatch.setattr(sys, "argv", arguments)
        evaluate.main()
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["task"] for line in lines} == {task.id for task in tasks("audit", 20)}
    assert all(line["score"] == float(line["kind"] != "Day and time?") for line in lines)
    assert {call.headers["x-headrace-purpose"] for call in llm.calls} == {"eval"}


def test_the_services_take_the_settings_and_the_scorer_finds_the_function() -> None:
    config = tomllib.loads((FOLDER / "headrace.toml").read_text(encoding="utf-8"))
    gate, trainer = GateSettings(**config["registry"]["gate"]), TrainerSettings(**config["trainer"])
    assert gate.command[2] == "smollm2.evaluate"
    assert (trainer.model, trainer.base) == (recipe.read(FOLDER).model, BASE)
    scorer = ScorerSettings(**config["scorer"])
    assert [function.source for function in FunctionLoader().load(scorer.functions)] == ["function:right"]


@pytest.mark.parametrize("name", ["base", "agent", "measure"])
def test_each_command_of_the_recipe_is_a_program_of_the_example(name: str) -> None:
    placeholders = {"cache": "c", "seed": 0, "tasks": 9, "out": "o", "base_url": "u", "version": VERSION}
    _, flag, module, *_ = recipe.read(FOLDER).command(name, placeholders)
    assert flag == "-m"
    assert find_spec(module) is not None
