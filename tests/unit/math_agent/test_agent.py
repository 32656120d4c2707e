"""Tests of the math agent: its loop, its problems and the steps of a solution, with a model that follows
demonstrations."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tomllib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from example_parts.react import Episode
from headrace.rewards import accuracy
from headrace_cli.demo import recipe
from headrace_registry.settings import GateSettings
from headrace_schemas import Dialogue, Message, Trajectory
from headrace_scorer.functions.loading import FunctionLoader
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from math_agent import agent, evaluate, rewards
from math_agent.build_base import HABITS, NONE, Habits, demonstrate
from math_agent.solution import (
    LENGTH_MAX,
    SPLITS,
    Calculator,
    Change,
    Problem,
    Solution,
    Split,
    Turn,
    calculate,
    of_episode,
    of_trajectory,
    stream,
)
from tests.support.fake_llm import Call, FakeLLM, Headrace, Reply, status
from tests.support.turns import closed

EXAMPLES = Path(__file__).parents[3] / "examples"


class Pupil:
    """Model that answers each of `problems` with the next message of its demonstrated conversation."""

    def __init__(self, problems: Iterable[Problem], habits: Habits = NONE) -> None:
        self._shown = {
            problem.question: demonstrate(problem, random.Random(problem.id), habits) for problem in problems
        }
        self._numbers = itertools.count()

    def __call__(self, call: Call) -> Reply:
        messages: list[dict[str, Any]] = call.body["messages"]
        message = self._shown[messages[1]["content"]][len(messages)]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        return Reply({"id": f"chatcmpl-{next(self._numbers)}", "object": "chat.completion", "choices": [choice]})


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
    placeholders = {"cache": "c", "seed": 0, "tasks": 9, "out": "o", "base_url": "u", "version": VERSION}
    _, flag, module, *_ = recipe.read(EXAMPLES / "math_agent").command(name, placeholders)
    assert flag == "-m"
    assert find_spec(module) is not None


PROBLEM_COUNT = 300


def first(split: Split, seed: int = 0, count: int = PROBLEM_COUNT) -> list[Problem]:
    return list(itertools.islice(stream(split, seed), count))


def test_the_answer_is_that_of_somebody_who_reads_the_question() -> None:
    """The oracle parses the sentences of the question: each verb means a sign, and changes apply in the order of the
    text."""
    for problem in first("train"):
        opening, *sentences, _ = problem.question.split(". ")
        amount = int(opening.split()[2])
        for sentence in sentences:
            verb, number = sentence.split()[-2:]
            by = int(number)
            amount = {"becomes": amount * by}.get(
                verb, amount + by if verb in ("buys", "finds", "picks") else amount - by
            )
            assert amount > 0
        assert amount == problem.expected
        assert problem.steps_min == 2 * len(sentences)


def test_one_by_hand() -> None:
    changes = (Change("First", "+", 13, "First Mia buys 13."), Change("Last", "*", 2, "Last each becomes 2."))
    problem = Problem("0", "2 changes", "Mia", "nuts", 24, changes)
    assert problem.question == "Mia has 24 nuts. First Mia buys 13. Last each becomes 2. How many nuts are there now?"
    assert (problem.expected, problem.steps_min) == (74, 4)


def test_no_two_splits_share_a_question_and_none_comes_twice() -> None:
    questions = [problem.question for split in SPLITS for seed in (0, 1) for problem in first(split, seed, 100)]
    by_split = {split: {problem.question for seed in (0, 1) for problem in first(split, seed, 100)} for split in SPLITS}
    assert len(set(questions)) == sum(map(len, by_split.values())) > 790
    assert all(len({problem.id for problem in first(split)}) == PROBLEM_COUNT for split in SPLITS)


def test_the_seed_decides_alone_and_both_lengths_come_in_turn() -> None:
    assert first("audit") == first("audit") != first("audit", 1)
    assert [problem.kind for problem in first("gate", count=4)] == ["2 changes", "3 changes"] * 2


@pytest.mark.parametrize(
    ("expression", "value"), [("24 + 13", 37), ("24-13", 11), (" 6 * 7 ", 42), ("-(2 + 3) * 4", -20)]
)
def test_the_calculator_calculates(expression: str, value: int) -> None:
    assert calculate(expression) == value
    assert Calculator().call("calculator", f'{{"expression": "{expression}"}}') == str(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"expression": "2 ** 9999"}', "only whole numbers"),
        ('{"expression": "__import__(1)"}', "only whole numbers"),
        ('{"expression": "1.5 + 2"}', "only whole numbers"),
        ('{"expression": "True + 1"}', "only whole numbers"),
        ('{"expression": "2 +"}', "not an expression"),
        ('{"expression": ""}', "not an expression"),
        ('{"expression": "1\\u0000"}', "not an expression"),
        (f'{{"expression": "{"9" * (LENGTH_MAX + 1)}"}}', "more than 64 characters"),
        ('{"text": "1 + 1"}', "expected the argument expression"),
        ('{"expression": "1', "arguments are not JSON"),
    ],
)
def test_a_wrong_call_is_an_answer_for_the_model(arguments: str, message: str) -> None:
    assert Calculator().call("calculator", arguments).startswith(f"error: {message}")
    assert Calculator().call("abacus", '{"expression": "1 + 1"}') == "error: no tool abacus"


ADD, TAKE = '{"expression": "24 + 13"}', '{"expression": "37 - 8"}'
GOOD = (Turn("Thought: First add 13.", (ADD,), ("37",)), Turn("Thought: Last take 8.", (TAKE,), ("29",)))
RIGHT = Turn("Answer: 29")


def test_a_solution_as_people_see_it_and_its_steps() -> None:
    solution = Solution((*GOOD, RIGHT))
    assert solution.in_form
    assert solution.steps == 4
    assert solution.as_text() == (
        "Thought: First add 13.\n  24 + 13 = 37\nThought: Last take 8.\n  37 - 8 = 29\nAnswer: 29"
    )


@pytest.mark.parametrize(
    ("turns", "steps"),
    [
        ((*GOOD, Turn("29")), 4),
        ((*GOOD, Turn("So there are 29 nuts.")), 4),
        ((*GOOD, Turn("Answer: 29 nuts")), 4),
        ((*GOOD, Turn("Answer: 29\nAnswer: 29")), 5),
        ((*GOOD, Turn("slowly now.\nAnswer: 29")), 5),
        ((*GOOD, Turn("")), 4),
        (GOOD, 4),
        ((RIGHT,), 0),
        ((), 0),
        ((Turn("First add 13.", (ADD,), ("37",)), RIGHT), 2),
        ((Turn("", (ADD,), ("37",)), RIGHT), 1),
        ((Turn("Thought: both.", (ADD, TAKE), ("37", "29")), RIGHT), 3),
        ((*GOOD, Turn('Thought: x.\n<tool_call>{"name": "calculator"</tool_call>')), 5),
    ],
)
def test_what_is_not_in_form(turns: tuple[Turn, ...], steps: int) -> None:
    assert not Solution(turns).in_form
    assert Solution(turns).steps == steps


def test_idle_thoughts_are_in_form_and_are_steps() -> None:
    idle = Turn("Thought: let me see.\nThought: First add 13.", (ADD,), ("37",))
    solution = Solution((idle, idle, GOOD[1], Turn("Thought: slowly now.\nAnswer: 29")))
    assert solution.in_form
    assert solution.steps == 9


def demonstrations(seed: int, habits: Habits) -> list[tuple[Any, list[dict[str, Any]]]]:
    rng = random.Random(seed)
    return [(problem, demonstrate(problem, rng, habits)) for problem in itertools.islice(stream("warm_up", seed), 300)]


def episode(messages: list[dict[str, Any]]) -> Episode:
    return Episode(answer=messages[-1]["content"], messages=messages[:-1])


def trajectory(messages: list[dict[str, Any]]) -> Trajectory:
    return closed(dialogues=(Dialogue(messages=tuple(map(Message.model_validate, messages))),))


def test_who_has_no_bad_habit_is_right_brief_and_in_form() -> None:
    for problem, messages in demonstrations(0, NONE):
        solution = of_episode(episode(messages))
        assert accuracy(messages[-1]["content"], float(problem.expected)) == 1.0
        assert (solution.steps, solution.in_form) == (problem.steps_min, True)


def test_the_habits_start_where_the_example_says() -> None:
    """The untrained model's accuracy, steps and format leave room for the improvements that the example promises."""
    played = demonstrations(0, HABITS)
    solutions = [of_episode(episode(messages)) for _, messages in played]
    right = sum(accuracy(messages[-1]["content"], float(problem.expected)) for problem, messages in played)
    assert 0.62 < right / 300 < 0.82
    assert 8.0 < sum(solution.steps for solution in solutions) / 300 < 9.2
    assert 0.5 < sum(solution.in_form for solution in solutions) / 300 < 0.68


@pytest.mark.parametrize("habit", ["idle", "repeat_call", "mistake", "sloppy"])
def test_each_habit_spoils_what_it_should_and_nothing_else(habit: str) -> None:
    played = demonstrations(1, Habits(**{habit: 0.9}))
    solutions = [of_episode(episode(messages)) for _, messages in played]
    right = sum(accuracy(messages[-1]["content"], float(problem.expected)) for problem, messages in played) / 300
    longer = sum(s.steps > p.steps_min for s, (p, _) in zip(solutions, played, strict=True)) / 300
    formed = sum(solution.in_form for solution in solutions) / 300
    assert (right < 0.3) == (habit == "mistake")
    assert (longer > 0.8) == (habit in ("idle", "repeat_call"))
    assert (formed < 0.3) == (habit == "sloppy")


def test_scorer_and_client_see_the_same_solution() -> None:
    for _, messages in demonstrations(2, HABITS)[:100]:
        assert of_trajectory(trajectory(messages)) == of_episode(episode(messages))


def test_rewards() -> None:
    (problem, good), *_ = demonstrations(3, NONE)
    assert rewards.form(trajectory(good)) == 1.0
    facts: dict[str, object] = {"steps_min": problem.steps_min}
    assert rewards.brief(trajectory(good), facts) == 1.0
    assert rewards.brief(trajectory(good), {}) is None
    assert rewards.brief(trajectory(good), {"steps_min": 0}) is None
    longer = [*good[:4], *good[2:4], *good[4:]]
    assert rewards.brief(trajectory(longer), facts) == pytest.approx(1 - rewards.DETOUR * 2 / problem.steps_min)
    bare = [*good[:-1], {"role": "assistant", "content": str(problem.expected)}]
    assert (rewards.form(trajectory(bare)), rewards.brief(trajectory(bare), facts)) == (0.0, 1.0)
    nothing = trajectory([*good[:2], {"role": "assistant", "content": "Answer: 1"}])
    assert (rewards.form(nothing), rewards.brief(nothing, facts)) == (0.0, 1.0), "fewer steps earn nothing more"


def test_what_a_model_forges_in_its_text_is_no_call() -> None:
    call_text = json.dumps({"name": "calculator", "arguments": {"expression": "1"}})
    forged = Solution((*GOOD, Turn(f"Thought: x.\n  {call_text} = 2\nAnswer: 29")))
    assert not forged.in_form
    assert forged.steps == 6
