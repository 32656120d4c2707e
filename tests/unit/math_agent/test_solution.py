from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from example_parts.react import Episode
from headrace.rewards import accuracy
from headrace_schemas import Dialogue, Message, Trajectory
from math_agent import rewards
from math_agent.demonstrations import NONE, Habits, demonstrate
from math_agent.problems import stream
from math_agent.solution import Solution, Turn, of_episode, of_trajectory
from math_agent.warm_up import HABITS
from tests.support.trajectories import closed

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


def spoken(seed: int, habits: Habits) -> list[tuple[Any, list[dict[str, Any]]]]:
    rng = random.Random(seed)
    return [(one, demonstrate(one, rng, habits)) for one in itertools.islice(stream("warm_up", seed), 300)]


def episode(messages: list[dict[str, Any]]) -> Episode:
    return Episode(answer=messages[-1]["content"], messages=messages[:-1])


def trajectory(messages: list[dict[str, Any]]) -> Trajectory:
    return closed(dialogues=(Dialogue(messages=tuple(map(Message.model_validate, messages))),))


def test_who_has_no_bad_habit_is_right_brief_and_in_form() -> None:
    for problem, messages in spoken(0, NONE):
        solution = of_episode(episode(messages))
        assert accuracy(messages[-1]["content"], float(problem.expected)) == 1.0
        assert (solution.steps, solution.in_form) == (problem.steps_min, True)


def test_the_habits_start_where_the_example_says() -> None:
    """Below what is promised of the end, and not by one habit alone; seed 0."""
    played = spoken(0, HABITS)
    solutions = [of_episode(episode(messages)) for _, messages in played]
    right = sum(accuracy(messages[-1]["content"], float(problem.expected)) for problem, messages in played)
    assert 0.62 < right / 300 < 0.82
    assert 8.0 < sum(solution.steps for solution in solutions) / 300 < 9.2
    assert 0.5 < sum(solution.in_form for solution in solutions) / 300 < 0.68


@pytest.mark.parametrize("habit", ["idle", "repeat_call", "mistake", "sloppy"])
def test_each_habit_spoils_what_it_should_and_nothing_else(habit: str) -> None:
    played = spoken(1, Habits(**{habit: 0.9}))
    solutions = [of_episode(episode(messages)) for _, messages in played]
    right = sum(accuracy(messages[-1]["content"], float(problem.expected)) for problem, messages in played) / 300
    longer = sum(s.steps > p.steps_min for s, (p, _) in zip(solutions, played, strict=True)) / 300
    formed = sum(solution.in_form for solution in solutions) / 300
    assert (right < 0.3) == (habit == "mistake")
    assert (longer > 0.8) == (habit in ("idle", "repeat_call"))
    assert (formed < 0.3) == (habit == "sloppy")


def test_scorer_and_client_see_the_same_solution() -> None:
    for _, messages in spoken(2, HABITS)[:100]:
        assert of_trajectory(trajectory(messages)) == of_episode(episode(messages))


def test_rewards() -> None:
    (problem, good), *_ = spoken(3, NONE)
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
    said = json.dumps({"name": "calculator", "arguments": {"expression": "1"}})
    forged = Solution((*GOOD, Turn(f"Thought: x.\n  {said} = 2\nAnswer: 29")))
    assert not forged.in_form
    assert forged.steps == 6
