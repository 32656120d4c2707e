"""One run of `benchmarks.algorithms`: its base model, its tasks with their feedback, and lineages of the real trainer.

Each stage of a run starts from the last version of the previous stage.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks import _algorithms_users, _corrections
from benchmarks._algorithms_lines import EPISODES, Arm, Plan, RunResult, Stage
from benchmarks._algorithms_users import GROUP, experiences, feedback, no_functions
from benchmarks._corrections import Rooms, Walk
from benchmarks._engine_world import EngineWorld, PlayedRun
from benchmarks._learning_run import MODEL, SETTINGS, NewestVersion, World
from email_agent import build_base, demonstrations
from example_parts.base_model import Lesson, Schedule
from example_parts.react import Episode
from headrace_runtime.clock import SystemClock
from headrace_runtime.settings.sections import complete
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience
from headrace_scorer.reward_policy import RewardPolicy
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

POLICY = RewardPolicy({"feedback": 1.0, "doors": 1e-6}, required=["feedback"])
"""Reward policy: a run's reward is whether it reached the exit. Feedback on doors rewards turns, with almost no weight
for the run."""


class Corridor(EngineWorld[Walk]):
    """Corridor walks of one seed, with an inference engine."""

    agent, model = _corrections.AGENT, MODEL

    def questions(self, split: str) -> Iterator[Walk]:
        return _corrections.walks(split, self.seed)

    def tools_of(self, task: Walk) -> Rooms:
        return Rooms(task)

    def is_right(self, task: Walk, episode: Episode) -> bool:
        doors = _corrections.right_doors(task, episode.messages)
        return len(doors) == _corrections.ROOMS and all(doors)


async def _play_groups(world: Corridor, version: str, episodes: int) -> list[PlayedRun[Walk]]:
    """Play runs in groups, each with the same walk, and return them."""
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
        judged = zip(turns, _corrections.right_doors(run.task, run.episode.messages), strict=False)
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


CORRIDOR_SIGNALS: Mapping[str, Callable[[Corridor, str, int, Random], Awaitable[list[Experience]]]] = {
    "ends": _collector(doors=False),
    "ends and doors": _collector(doors=True),
}


_WEAK = demonstrations.Schedule(lapses=0.9)
"""Warm-up of the weak base. In nine of ten late conversations the agent makes mistakes, so that the base succeeds in
one or two of ten runs.
"""
LESSONS: Mapping[str, tuple[Lesson, Schedule]] = {
    "e-mail": (build_base.LESSON, build_base.LESSON.schedule),
    "e-mail, weak base": (build_base.LESSON, _WEAK),
    "e-mail with corrections": (_corrections.LESSON, _corrections.LESSON.schedule),
    "corridor": (_corrections.CORRIDOR, _corrections.CORRIDOR.schedule),
}


def base_of(lesson: str, seed: int, cache: Path) -> Path:
    """Return the folder of the base model of a seed; if it does not exist, build it in about a minute of one core."""
    lesson_of_base, schedule = LESSONS[lesson]
    return lesson_of_base.build(cache, lesson_of_base.recipe(seed, schedule)).absolute()


ROUNDS_MAX = 6
"""Maximum number of rounds of episodes for one batch, because algorithms drop experiences without a signal for them."""
WORLDS: dict[str, type[EngineWorld[Any]]] = {
    "e-mail": World,
    "e-mail, weak base": World,
    "e-mail with corrections": World,
    "corridor": Corridor,
}
SIGNALS: dict[str, Any] = {**_algorithms_users.SIGNALS, **CORRIDOR_SIGNALS}


def run(arm: Arm, seed: int, base: Path, plan: Plan, versions: Path) -> RunResult:
    """Run one arm with one seed. `versions` holds the last versions of teacher arms, and receives the last version of
    this arm."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-algorithms-") as scratch:
        return asyncio.run(_run(arm, seed, base, plan, versions, Path(scratch)))


def version_folder(versions: Path, arm: str, seed: int) -> Path:
    """Return the folder of the last version of an arm."""
    return versions / f"{arm}-{seed}"


def settings_of(stage: Stage, seed: int, base: Path, teacher: str = "", lineage: str = "main") -> TrainerSettings:
    """Return the demo's settings with another algorithm and a version for each step."""
    fixed = {"base": str(base), "seed": seed, "steps_per_version": 1, "lineage": lineage, "algorithm": stage.algorithm}
    table: dict[str, Any] = {**SETTINGS["trainer"], **fixed}
    for name, value in {**stage.settings, **({"teacher.model": teacher} if teacher else {})}.items():
        section = table
        *path, last = name.split(".")
        for part in path:
            section[part] = dict(section.get(part, {}))
            section = section[part]
        section[last] = value
    return complete(TrainerSettings).model_validate(table)  # includes the sections of plug-in algorithms


async def _run(arm: Arm, seed: int, base: Path, plan: Plan, versions: Path, scratch: Path) -> RunResult:
    began = time.perf_counter()
    result = RunResult(arm.name, seed, [])
    blobs = BlobStore((scratch / "blobs").as_uri())
    teacher = str(version_folder(versions, arm.teacher, seed).absolute()) if arm.teacher else ""
    async with WORLDS[arm.lesson].open(seed, blobs, scratch / "versions") as world:
        for number, stage in enumerate(arm.stages):
            settings = settings_of(stage, seed, base, teacher, f"stage-{number}")
            lineage = open_lineage(settings, blobs, SystemClock())
            training = _Training(stage, seed, lineage, world, result)
            for _ in range(round(plan.steps * stage.share)):
                if not await training.step():
                    break
            version = await training.version()
            base = await training.folder()
            result.steps += lineage.state.steps
            result.health = lineage.health.stopped.reason if lineage.health.stopped else result.health
            lineage.close()
        result.scores = await world.score(version, plan.plays)
    _keep(base, version_folder(versions, arm.name, seed))
    result.seconds = round(time.perf_counter() - began, 1)
    return result


def _keep(version: Path, folder: Path) -> None:
    """Copy a version to its folder atomically, so that no other run reads an incomplete copy."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.half")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(version, partial)
    partial.rename(folder)


class _Training:
    def __init__(self, stage: Stage, seed: int, lineage: Lineage, world: EngineWorld[Any], result: RunResult) -> None:
        self._stage, self._lineage, self._world, self._result = stage, lineage, world, result
        self._chance = Random(f"{stage.algorithm} {stage.signal} {seed}")
        self._next_offset = 0
        self.version = NewestVersion(lineage, world)

    async def folder(self) -> Path:
        """Return the folder of the newest version."""
        checkpoint = self._lineage.saved.checkpoint
        assert checkpoint is not None
        return await self._world.folder(checkpoint.manifest)

    async def step(self) -> bool:
        """Take one training step. Return False if training stopped itself or the feedback has no signal for the
        algorithm."""
        lineage, stop = self._lineage, threading.Event()
        version = await self.version()
        for _ in range(ROUNDS_MAX):
            experiences = await SIGNALS[self._stage.signal](self._world, version, EPISODES, self._chance)
            self._result.episodes += EPISODES
            for experience in self._stage.change(experiences, self._chance):
                lineage.state.admit(experience, (0, self._next_offset), experience.time)
                self._next_offset += 1
            if items := lineage.next_batch():
                break
        else:
            return False
        metrics = await asyncio.to_thread(lineage.step, items, stop)
        if not metrics:
            return False
        self._result.experiences += len(items)
        await asyncio.to_thread(lambda: lineage.save(publish=True))
        return lineage.health.stopped is None
