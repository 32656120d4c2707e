"""One run of `benchmarks.algorithms`: lineages of the real trainer, each stage from the version of the stage before."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks import _algorithms_corridor, _algorithms_users
from benchmarks._algorithms_lines import EPISODES, Arm, Plan, RunResult, Stage
from benchmarks._engine_world import EngineWorld
from benchmarks._learning_run import SETTINGS, NewestVersion, World
from headrace_runtime.clock import SystemClock
from headrace_runtime.settings.sections import complete
from headrace_runtime.storage.blobs import BlobStore
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

ROUNDS_MAX = 6
"""Maximum number of rounds of episodes for one batch, because algorithms drop experiences without a signal for them."""
WORLDS: dict[str, type[EngineWorld[Any]]] = {
    "e-mail": World,
    "e-mail, weak base": World,
    "e-mail with corrections": World,
    "corridor": _algorithms_corridor.Corridor,
}
SIGNALS: dict[str, Any] = {**_algorithms_users.SIGNALS, **_algorithms_corridor.SIGNALS}


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
