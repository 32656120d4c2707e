"""The corridor as a world, with feedback on whether a run reached the exit and on whether each door was right.

Warm-up lessons of the base models by name, and the function that builds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from random import Random

from benchmarks import _corrections, _corridor
from benchmarks._algorithms_users import GROUP, experiences, feedback, no_functions
from benchmarks._corridor import Rooms, Walk
from benchmarks._engine_world import EngineWorld, PlayedRun
from benchmarks._learning_run import MODEL
from email_agent import build_base, warm_up
from example_parts.base_model import Lesson
from example_parts.react import Episode
from example_parts.warm_up import Schedule
from headrace_schemas import Experience
from headrace_scorer.reward_policy import RewardPolicy

POLICY = RewardPolicy({"feedback": 1.0, "doors": 1e-6}, required=["feedback"])
"""Reward policy: a run's reward is whether it reached the exit. Feedback on doors rewards turns, with almost no weight
for the run."""


class Corridor(EngineWorld[Walk]):
    """The walks of one seed, with an engine."""

    agent, model = _corridor.AGENT, MODEL

    def questions(self, split: str) -> Iterator[Walk]:
        return _corridor.walks(split, self.seed)

    def tools_of(self, task: Walk) -> Rooms:
        return Rooms(task)

    def is_right(self, task: Walk, episode: Episode) -> bool:
        doors = _corridor.right_doors(task, episode.messages)
        return len(doors) == _corridor.ROOMS and all(doors)


async def _play_groups(world: Corridor, version: str, episodes: int) -> list[PlayedRun[Walk]]:
    """Play runs in groups of the same walk."""
    walks = list(itertools.islice(world.training_tasks, episodes // GROUP))
    return await world.play_all(version, [walk for walk in walks for _ in range(GROUP)])


def _collector(*, doors: bool) -> Callable[[Corridor, str, int, Random], Awaitable[list[Experience]]]:
    async def collect(world: Corridor, version: str, episodes: int, _draw: Random) -> list[Experience]:
        runs = await _play_groups(world, version, episodes)
        return [experience for run in runs for experience in _experiences(world, run, doors=doors)]

    return collect


def _experiences(world: Corridor, run: PlayedRun[Walk], *, doors: bool) -> list[Experience]:
    turns = run.turns
    reached_exit = float(world.is_right(run.task, run.episode))
    ids = [turn.turn_id for turn in turns]
    feedback_events = [feedback(run, msg_ids=ids, level="session", task_id=run.task.id, value=reached_exit)]
    if doors:
        judged = zip(turns, _corridor.right_doors(run.task, run.episode.messages), strict=False)
        for turn, is_right in judged:
            feedback_events.append(
                feedback(
                    run,
                    msg_ids=[turn.turn_id],
                    level="turn",
                    source="doors",
                    task_id=run.task.id,
                    value=float(is_right),
                )
            )
    return experiences(run, feedback_events, no_functions, POLICY)


SIGNALS: Mapping[str, Callable[[Corridor, str, int, Random], Awaitable[list[Experience]]]] = {
    "ends": _collector(doors=False),
    "ends and doors": _collector(doors=True),
}


_WEAK = warm_up.Schedule(lapses=0.9)
"""Schedule of the weak base. Nine of ten conversations at the end of its warm-up go wrong, so that it succeeds in one
or two of ten runs."""
LESSONS: Mapping[str, tuple[Lesson, Schedule]] = {
    "e-mail": (build_base.LESSON, build_base.LESSON.schedule),
    "e-mail, weak base": (build_base.LESSON, _WEAK),
    "e-mail with corrections": (_corrections.LESSON, _corrections.LESSON.schedule),
    "corridor": (_corridor.LESSON, _corridor.LESSON.schedule),
}


def base_of(lesson: str, seed: int, cache: Path) -> Path:
    """Return the folder of the base model of a seed. If it does not exist, build it first, which takes about a minute
    of one core."""
    lesson_of_base, schedule = LESSONS[lesson]
    return lesson_of_base.build(cache, lesson_of_base.recipe(seed, schedule)).absolute()
