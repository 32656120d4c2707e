"""Tests of the benchmark `algorithms`: its arms cover the registry of algorithms, its control arms shuffle the training
signals, and its pass criteria fail when a fault is injected into constructed results.

A simulated user of this benchmark sends only the kind of feedback that its algorithm trains on.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import _algorithms_users, _corrections
from benchmarks._algorithms_lines import (
    CONTROLS,
    PER_TURN,
    SFT_RL,
    STAGES,
    TERMINAL,
    Interval,
    RunResult,
    Table,
    algorithms,
    arms,
    lines,
    markdown,
)
from benchmarks._algorithms_users import (
    SIGNALS,
    shuffle_edits,
    shuffle_preference_sides,
    shuffle_replies,
    shuffle_turn_rewards,
)
from benchmarks._corrections import correction
from email_agent import mailbox
from email_agent.agent import THANKS
from email_agent.demonstrations import ROUTES
from email_agent.mailbox import Mailtools, Task, stream
from email_agent.typed import TYPED_LESSON
from example_parts.react import Episode
from headrace_schemas import Edit, Experience, Message, PreferenceSide, TurnReward
from headrace_statistics.intervals import Score
from headrace_trainer.algorithms.presets import ALGORITHMS, Algorithm
from tests.support.turns import after, ask, user
from tests.unit.trainer import world

SEEDS, TASKS = 5, 60
BASE, LEARNED = 0.35, 0.6
RUNS = {arm.name: BASE if arm.control_of or not arm.stages[0].share else LEARNED for arm in arms()}
RUNS |= {SFT_RL: 0.75, PER_TURN: 0.75}


def plays(score: float, seed: int) -> list[Score]:
    """Return one simulated score for each task. Arms with equal `seed` use equal random numbers, so only `score`
    differs."""
    draw = random.Random(seed)
    return [(f"{seed}-{task}", float(draw.random() < score)) for task in range(TASKS)]


def missed(changed: dict[str, float]) -> set[str]:
    runs = [
        RunResult(arm, seed, plays(score, seed)) for arm, score in (RUNS | changed).items() for seed in range(SEEDS)
    ]
    return {line.name.split(":")[0] for line in lines(Table(arms(), runs)) if not line.holds}


def test_each_algorithm_of_the_registry_has_an_arm() -> None:
    trained = {stage.algorithm for arm in algorithms() for stage in arm.stages}
    announced = ALGORITHMS.all()
    assert all(any(algorithm is announced[name] for name in trained) for algorithm in announced.values())


def test_planted_an_algorithm_without_a_stage_and_a_stage_without_one_are_named() -> None:
    announced = dict(ALGORITHMS.all())
    with pytest.raises(
        LookupError, match=r"algorithms without a stage: brand_new; .* none; update STAGES in benchmarks/"
    ):
        algorithms({**announced, "brand_new": Algorithm("grpo", "gspo")})
    del announced["kto"]
    with pytest.raises(LookupError, match="stages without an algorithm: kto;"):
        algorithms(announced)


def test_all_stages_have_users_who_say_it_and_settings_that_the_trainer_takes() -> None:
    from pathlib import Path

    from benchmarks._algorithms_run import LESSONS, SIGNALS, WORLDS, settings_of

    for arm in arms():
        assert arm.lesson in WORLDS
        assert arm.lesson in LESSONS
        for stage in arm.stages:
            assert stage.signal in SIGNALS
            assert settings_of(stage, 3, Path("base"), arm.teacher).seed == 3


def test_the_files_of_every_lesson_exist_and_determine_its_base() -> None:
    from benchmarks import _algorithms_run, _gains_run
    from email_search.build_base import LESSON as EMAIL_SEARCH
    from math_agent.build_base import LESSON as MATH
    from werewolf.build_base import LESSON as WEREWOLF

    lessons = [lesson for lesson, _ in _algorithms_run.LESSONS.values()]
    lessons += [*_gains_run.LESSONS.values(), TYPED_LESSON, EMAIL_SEARCH, MATH, WEREWOLF]
    assert len({lesson.digest(lesson.recipe()) for lesson in lessons}) == len({lesson.name for lesson in lessons}) == 8


def test_a_sound_trainer_misses_no_line() -> None:
    assert missed({}) == set()
    runs = [RunResult(arm, seed, plays(score, seed)) for arm, score in RUNS.items() for seed in range(SEEDS)]
    assert "| gspo | gspo from groups | " in markdown(Table(arms(), runs).rows())


@pytest.mark.parametrize("name", [*STAGES, SFT_RL, PER_TURN])
def test_what_learns_nothing_is_missed(name: str) -> None:
    assert name in missed({name: BASE})


@pytest.mark.parametrize("control", [arm.name for arm in CONTROLS])
def test_a_control_that_learns_is_missed(control: str) -> None:
    assert missed({control: 0.5}) == {control}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({SFT_RL: LEARNED}, "sft and then reinforce++"),
        ({TERMINAL: 0.75}, "rewards of turns"),
    ],
)
def test_a_planted_fault_misses_its_line(changed: dict[str, float], line: str) -> None:
    assert line in missed(changed)


def test_the_interval_is_student_s() -> None:
    interval = Interval.of([0.1, 0.2, 0.3, 0.4, 0.5])
    half = 2.7764451 * math.sqrt(0.025 / 5)  # by hand: variance 0.1 / 4
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    with pytest.raises(ValueError, match="1 seeds: an interval needs 2 or more"):
        Interval.of([0.1])


def experience_with_signals(number: int) -> Experience:
    """Return an experience with an edit, one side of a preference pair, and a reward for its first turn."""
    plain = world.experience(number, "m@0123456789abcdef", 1.0)
    turn, pair = f"turn-{number}-0", f"pair-{number // 2}"
    side = PreferenceSide(preference_id=pair, side="rejected" if number % 2 else "chosen", turn_id=turn)
    edit = Edit(turn_id=turn, message=Message(role="assistant", content=f"edit {number}"))
    turns = (TurnReward(turn_id=turn, value=float(number)),)
    return plain.model_copy(update={"preferences": (side,), "edits": (edit,), "turn_rewards": turns})


SignalReader = Callable[[Experience], object]


@pytest.mark.parametrize(
    ("shuffle", "read_signal"),
    [
        (shuffle_edits, lambda experience: experience.edits[0].message.text),
        (shuffle_turn_rewards, lambda experience: experience.turn_rewards[0].value),
    ],
)
def test_what_was_said_is_dealt_to_others(shuffle: Callable[..., list[Experience]], read_signal: SignalReader) -> None:
    before = [experience_with_signals(number) for number in range(40)]
    after = shuffle(before, random.Random(0))
    assert sorted(map(str, map(read_signal, after))) == sorted(map(str, map(read_signal, before)))
    assert (
        sum(read_signal(shuffled) == read_signal(original) for shuffled, original in zip(after, before, strict=True))
        < 5
    )
    assert [experience.edits[0].turn_id for experience in after] == [
        experience.edits[0].turn_id for experience in before
    ]


def test_replies_are_put_in_place_of_others_and_answers_stay() -> None:
    before = []
    for number in range(20):
        plain = world.experience(number, "", 1.0, versions=["m@0123456789abcdef"] * 2, length=13 + number, prompt=5)
        assert plain.branch is not None
        first, second = plain.branch.spans
        logprobs = first.logprobs[:2]
        branch = plain.branch.model_copy(update={"spans": (first.model_copy(update={"logprobs": logprobs}), second)})
        before.append(plain.model_copy(update={"branch": branch}))
    silent = before.pop().model_copy(update={"turn_ids": ()})
    after = shuffle_replies([*before, silent], {f"turn-{number}-0" for number in range(19)}, random.Random(0))
    assert after.pop() == silent
    assert sorted(map(reply, after)) == sorted(map(reply, before))
    assert sum(reply(shuffled) == reply(original) for shuffled, original in zip(after, before, strict=True)) < 5
    for shuffled, original in zip(after, before, strict=True):
        assert [span_tokens(shuffled, index) for index in (0, 1)] == [span_tokens(original, index) for index in (0, 1)]
        assert Experience.model_validate_json(shuffled.to_json()) == shuffled


def reply(experience: Experience) -> tuple[int, ...]:
    assert experience.branch is not None
    first, second = experience.branch.spans
    return tuple(experience.branch.token_ids[first.stop : second.start])


def span_tokens(experience: Experience, index: int) -> tuple[int, ...]:
    assert experience.branch is not None
    span = experience.branch.spans[index]
    return tuple(experience.branch.token_ids[span.start : span.stop])


def test_a_coin_turns_both_sides_of_a_comparison() -> None:
    before = [experience_with_signals(number) for number in range(80)]
    sides = [experience.preferences[0].side for experience in shuffle_preference_sides(before, random.Random(0))]
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    assert set(pairs) == {("chosen", "rejected"), ("rejected", "chosen")}
    assert 10 < pairs.count(("chosen", "rejected")) < 30


def test_the_corridor_tells_right_doors_and_asks_nothing_of_the_audit() -> None:
    walk = _corrections.Walk(_corrections.SIGNS[: _corrections.ROOMS])
    rooms = _corrections.Rooms(walk)
    messages = []
    for number, sign in enumerate(walk.signs):
        direction = _corrections.DOOR_OF[sign] if number else "nowhere"
        arguments = f'{{"door": "{direction}"}}'
        function = {"name": "take_door", "arguments": arguments}
        messages.append({"role": "assistant", "tool_calls": [{"function": function}]})
        answer = rooms.call("take_door", arguments)
        assert answer.startswith("error") if number == 0 else answer in (*walk.signs, "exit")
    assert _corrections.right_doors(walk, messages) == [False] + [True] * (_corrections.ROOMS - 1)
    assert _corrections.right_doors(walk, [{"role": "assistant", "content": "out"}]) == []
    training_tasks = {split: _corrections.walks(split, 0) for split in ("train", "audit")}
    trained, audited = ({next(source).id for _ in range(500)} for source in training_tasks.values())
    assert not trained & audited
    assert replace(walk, signs=("moon",)).question == "The sign is moon"


BOX = mailbox.generate(3)
TASK: Task = next(stream(BOX, "train", 3))


def run(*answers: str, session: str = "s") -> Any:
    """Return a run of an agent that answers without tools, and answers again after each user message "go on"."""
    turns = [ask([user(TASK.question)], answers[0], session=session)]
    for text in answers[1:]:
        turns.append(ask(after(turns[-1], user("go on")), text, session=session))
    messages = [{"role": "user", "content": TASK.question}]
    episode = Episode(answers[-1], [turn.turn_id for turn in turns], messages=messages)
    client = SimpleNamespace(turns=turns, version=turns[0].version)
    return SimpleNamespace(task=TASK, client=client, turns=turns, episode=episode)


def collect_experience(signal: str, *answers: str) -> Experience:
    """Return the experience that is collected from a run after the simulated user of `signal` sent its feedback."""
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
