"""Each user of `make bench NAME=algorithms` gives the one signal that the algorithm trains, and no other."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import _algorithms_users
from benchmarks._algorithms_users import SIGNALS
from benchmarks._corrections import correction
from email_agent import mailbox
from email_agent.demonstrations import ROUTES
from email_agent.tasks import Task, stream
from email_agent.tools import Mailtools
from email_agent.users import THANKS
from example_parts.react import Episode
from headrace_schemas import Experience
from tests.support.turns import after, ask, user

BOX = mailbox.generate(3)
TASK: Task = next(stream(BOX, "train", 3))


def run(*answers: str, session: str = "s") -> Any:
    """Return a run of an agent that answers without tools, and answers again after each message "go on"."""
    turns = [ask([user(TASK.question)], answers[0], session=session)]
    for text in answers[1:]:
        turns.append(ask(after(turns[-1], user("go on")), text, session=session))
    messages = [{"role": "user", "content": TASK.question}]
    episode = Episode(answers[-1], [turn.turn_id for turn in turns], messages=messages)
    client = SimpleNamespace(turns=turns, version=turns[0].version)
    return SimpleNamespace(task=TASK, client=client, turns=turns, episode=episode)


def collect_experience(signal: str, *answers: str) -> Experience:
    """Return the experience of the run after the user of `signal` has given feedback."""
    played_run = run(*answers)

    async def play_all(_version: str, _tasks: object) -> list[Any]:
        return [played_run]

    right = played_run.episode.answer == TASK.expected
    world = SimpleNamespace(
        training_tasks=iter([TASK] * 99),
        tools=Mailtools(BOX.open()),
        play_all=play_all,
        is_right=lambda _task, _episode: right,
    )

    async def collect() -> list[Experience]:
        return await SIGNALS[signal](cast(Any, world), "v", 64, Random(0))

    (experience,) = asyncio.run(collect())
    return experience


def test_a_label_says_whether_and_an_edit_what_instead() -> None:
    right, wrong = collect_experience("labels", TASK.expected), collect_experience("labels", "unknown")
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    experience = collect_experience("edits", "unknown")
    assert experience.reward is None
    assert experience.branch is not None
    (edit,) = experience.edits
    assert edit.turn_id == experience.turn_ids[0]
    assert [call.function.name for call in edit.message.tool_calls or ()] == [ROUTES[TASK.kind][0]]


def test_rewards_are_the_demo_s_and_groups_are_runs_of_one_question() -> None:
    alone, grouped = collect_experience("rewards", TASK.expected), collect_experience("groups", TASK.expected)
    assert alone.reward == grouped.reward == pytest.approx(1 / 1.7), "right, without evidence and without a tool"
    assert (alone.task_id, grouped.task_id) == (TASK.kind, TASK.id)
    both = collect_experience("edits and rewards", "unknown")
    assert (both.reward, len(both.edits)) == (0.0, 1)


def test_a_step_that_was_wrong_is_worth_nothing_and_those_after_it_are_not_judged() -> None:
    experience = collect_experience("turns", "unknown", "unknown")
    assert [(turn_reward.turn_id, turn_reward.value) for turn_reward in experience.turn_rewards] == [
        (experience.turn_ids[0], 0.0)
    ]
    assert collect_experience("turns", TASK.expected).reward == pytest.approx(1 / 1.7), (
        "what is said of turns moves no reward"
    )


def test_who_says_nothing_leaves_the_tokens() -> None:
    experience = collect_experience("nothing", "unknown")
    assert (experience.reward, experience.no_reward, experience.edits, experience.preferences) == (
        None,
        "no_reward",
        (),
        (),
    )
    assert experience.branch is not None


def test_the_better_run_s_first_other_answer_is_preferred() -> None:
    better, worse = run("same", TASK.expected, session="a"), run("same", "unknown", session="b")
    experiences = _algorithms_users._compare_best_with_worst([worse, better])
    sides = {side.turn_id: side for experience in experiences for side in experience.preferences}
    assert len({side.preference_id for side in sides.values()}) == 1
    assert (sides[better.turns[1].turn_id].side, sides[worse.turns[1].turn_id].side) == ("chosen", "rejected")
    assert all(experience.reward is None for experience in experiences)
    assert _algorithms_users._compare_best_with_worst([worse, run("same", "unknown", session="c")]) == [], (
        "no better one"
    )
    other = run(TASK.expected, session="d")
    assert len(_algorithms_users._compare_best_with_worst([other, run("unknown", session="e")])) == 2


def test_a_correction_names_the_next_tool_and_then_the_answer() -> None:
    first, second = ROUTES["attachment"]
    tool_message = {"role": "tool", "content": "something"}
    assert correction("attachment", "a.pdf", []) == f"No, that is wrong. Use {first}."
    assert correction("attachment", "a.pdf", [tool_message]) == f"No, that is wrong. Use {second}."
    assert correction("attachment", "a.pdf", [tool_message, tool_message]) == "No, that is wrong. It is a.pdf."
    assert "Thank" in THANKS
