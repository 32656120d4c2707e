from __future__ import annotations

import argparse
import itertools
import json
import sys
import tomllib
from importlib.util import find_spec

import pytest

from headrace_cli.demo import recipe
from headrace_registry.settings import GateSettings
from headrace_scorer.functions.loading import FunctionLoader
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from math_agent import agent, evaluate
from math_agent.demonstrations import NONE, Habits
from math_agent.problems import SPLITS, stream
from tests.support.fake_llm import FakeLLM, status
from tests.support.headrace_in_memory import Headrace

from .conftest import EXAMPLES
from .pupil import Pupil

VERSION = "math-agent@0123456789abcdef"


def pupil(habits: Habits = NONE) -> Pupil:
    return Pupil([problem for split in SPLITS for problem in itertools.islice(stream(split, 1), 30)], habits)


async def test_each_answer_gets_one_feedback_with_the_facts_that_rewards_need() -> None:
    headrace = Headrace(pupil())
    options = argparse.Namespace(model="m", seed=1, tasks=12, concurrency=3, max_tokens=64)
    users = agent.Users(headrace.client(), options)
    await users.ask()
    problems = list(itertools.islice(stream("train", 1), 12))
    feedback_facts = sorted(
        (body["task_id"], body["context"]["expected"], body["context"]["steps_min"]) for body in headrace.feedback
    )
    assert feedback_facts == sorted((problem.kind, problem.expected, problem.steps_min) for problem in problems)
    assert sorted(msg_id for body in headrace.feedback for msg_id in body["msg_ids"]) == sorted(headrace.spoken)
    assert all(body["ends_session"] and "value" not in body for body in headrace.feedback)
    assert "12 questions, 100% of the answers accepted, 42 model calls" in users.tally.line()


def run_evaluation(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, object]]:
    flags = f"--base-url {llm.base_url} --model {VERSION} --seed 1 --concurrency 4 --tasks 20".split()
    monkeypatch.setattr(sys, "argv", ["evaluate", *flags])
    evaluate.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_it_prints_score_steps_form_and_solution_of_each_audit_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(pupil()) as llm:
        lines = run_evaluation(llm, monkeypatch, capsys)
    problems = {problem.id: problem for problem in itertools.islice(stream("audit", 1), 20)}
    assert {line["task"] for line in lines} == problems.keys()
    for line in lines:
        problem = problems[str(line["task"])]
        assert (line["score"], line["steps"], line["format"]) == (1.0, problem.steps_min, 1.0)
        assert str(line["solution"]).startswith(f"{problem.question}\nThought: First ")
        assert str(line["solution"]).endswith(f"\nAnswer: {problem.expected}")
    assert {call.headers["x-headrace-purpose"] for call in llm.calls} == {"eval"}
    assert {call.body["model"] for call in llm.calls} == {VERSION}


def test_a_detour_a_mistake_and_a_sloppy_answer_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, habits in {
        "steps": Habits(repeat_call=1.0),
        "score": Habits(mistake=1.0),
        "format": Habits(sloppy=1.0),
    }.items():
        with FakeLLM(pupil(habits)) as llm:
            lines = run_evaluation(llm, monkeypatch, capsys)
        means = {key: sum(float(str(line[key])) for line in lines) / 20 for key in ("score", "steps", "format")}
        assert (means["score"] < 0.3) == (name == "score")
        assert (means["steps"] == 10.0) == (name == "steps")
        assert (means["format"] == 0.0) == (name == "format")


def test_a_problem_that_could_not_be_played_fails_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(pupil()) as llm:
        llm.then(status(400))
        with pytest.raises(SystemExit, match=r"1 tasks could not be played.*BadRequestError"):
            run_evaluation(llm, monkeypatch, capsys)
    assert len(capsys.readouterr().out.splitlines()) == 19


def test_the_services_take_the_settings_and_the_scorer_finds_the_functions() -> None:
    config = tomllib.loads((EXAMPLES / "math_agent" / "headrace.toml").read_text(encoding="utf-8"))
    gate, trainer = GateSettings(**config["registry"]["gate"]), TrainerSettings(**config["trainer"], base="b")
    scorer = ScorerSettings(**config["scorer"])
    assert gate.command[2] == "math_agent.evaluate"
    assert trainer.model == recipe.read(EXAMPLES / "math_agent").model
    sources = [function.source for function in FunctionLoader().load(scorer.functions)]
    assert scorer.weights.keys() == set(sources) >= set(scorer.required)


@pytest.mark.parametrize("name", ["base", "agent", "measure"])
def test_each_command_of_the_recipe_is_a_program_of_the_example(name: str) -> None:
    placeholders = {"cache": "c", "seed": 0, "out": "o", "base_url": "u", "version": VERSION}
    _, flag, module, *_ = recipe.read(EXAMPLES / "math_agent").command(name, placeholders)
    assert flag == "-m"
    assert find_spec(module) is not None
