"""The corridor as a world, and what is said of runs in it: whether they came out, and of each door whether it was
right."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from random import Random

from benchmarks import _corridor
from benchmarks._algorithms_users import GROUP, experiences, feedback, nobody
from benchmarks._corridor import Rooms, Walk
from benchmarks._engine_world import EngineWorld, PlayedRun
from benchmarks._learning_world import MODEL
from example_parts.react import Episode
from headrace_schemas import Experience
from headrace_scorer.reward_policy import RewardPolicy

POLICY = RewardPolicy({"feedback": 1.0, "doors": 1e-6}, required=["feedback"])
"""The reward of a run is whether it came out. What is said of doors counts for their turns, and for the run next to
nothing."""


class Corridor(EngineWorld[Walk]):
    """The walks of one seed, and an engine."""

    agent, model = _corridor.AGENT, MODEL

    def questions(self, split: str) -> Iterator[Walk]:
        return _corridor.walks(split, self.seed)

    def tools_of(self, task: Walk) -> Rooms:
        return Rooms(task)

    def right(self, task: Walk, episode: Episode) -> bool:
        found = _corridor.right_doors(task, episode.messages)
        return len(found) == _corridor.ROOMS and all(found)


async def _played(world: Corridor, version: str, episodes: int) -> list[PlayedRun[Walk]]:
    """In groups of runs of one walk."""
    asked = list(itertools.islice(world.asked, episodes // GROUP))
    return await world.played(version, [one for one in asked for _ in range(GROUP)])


def _collector(*, doors: bool) -> Callable[[Corridor, str, int, Random], Awaitable[list[Experience]]]:
    async def collect(world: Corridor, version: str, episodes: int, _draw: Random) -> list[Experience]:
        runs = await _played(world, version, episodes)
        return [made for run in runs for made in _experiences(world, run, doors=doors)]

    return collect


def _experiences(world: Corridor, run: PlayedRun[Walk], *, doors: bool) -> list[Experience]:
    turns = run.turns
    out = float(world.right(run.task, run.episode))
    ids = [turn.turn_id for turn in turns]
    told = [feedback(run, msg_ids=ids, level="session", task_id=run.task.id, value=out)]
    if doors:
        judged = zip(turns, _corridor.right_doors(run.task, run.episode.messages), strict=False)
        for turn, right in judged:
            told.append(
                feedback(
                    run, msg_ids=[turn.turn_id], level="turn", source="doors", task_id=run.task.id, value=float(right)
                )
            )
    return experiences(run, told, nobody, POLICY)


SIGNALS: Mapping[str, Callable[[Corridor, str, int, Random], Awaitable[list[Experience]]]] = {
    "ends": _collector(doors=False),
    "ends and doors": _collector(doors=True),
}
