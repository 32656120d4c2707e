"""One run of `make bench-algorithms`: lineages of the real trainer, each stage from what the one before has made."""

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
from benchmarks._algorithms_found import EPISODES, Arm, Found, Plan, Stage
from benchmarks._engine_world import EngineWorld
from benchmarks._learning_run import Newest
from benchmarks._learning_world import SETTINGS, World
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import SystemClock
from headrace_runtime.settings import complete
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

ROUNDS_MAX = 6
"""Times that so many episodes are played for one batch, at most; algorithms drop what says nothing to them."""
WORLDS: dict[str, type[EngineWorld[Any]]] = {
    "e-mail": World,
    "e-mail, weak base": World,
    "e-mail with corrections": World,
    "corridor": _algorithms_corridor.Corridor,
}
SIGNALS: dict[str, Any] = {**_algorithms_users.SIGNALS, **_algorithms_corridor.SIGNALS}


def run(arm: Arm, seed: int, base: Path, plan: Plan, versions: Path) -> Found:
    """`versions` holds the last version of each arm that teaches another one, and gets this one's."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-algorithms-") as scratch:
        return asyncio.run(_run(arm, seed, base, plan, versions, Path(scratch)))


def kept(versions: Path, arm: str, seed: int) -> Path:
    """Where the last version of an arm lies."""
    return versions / f"{arm}-{seed}"


def settings_of(stage: Stage, seed: int, base: Path, teacher: str = "", lineage: str = "main") -> TrainerSettings:
    """Those of the demo with another algorithm, and a version for each step."""
    fixed = {"base": str(base), "seed": seed, "steps_per_version": 1, "lineage": lineage, "algorithm": stage.algorithm}
    table: dict[str, Any] = {**SETTINGS["trainer"], **fixed}
    for name, value in {**stage.settings, **({"teacher.model": teacher} if teacher else {})}.items():
        section = table
        *path, last = name.split(".")
        for part in path:
            section[part] = dict(section.get(part, {}))
            section = section[part]
        section[last] = value
    return complete(TrainerSettings).model_validate(table)  # with the sections that algorithms bring


async def _run(arm: Arm, seed: int, base: Path, plan: Plan, versions: Path, scratch: Path) -> Found:
    began = time.perf_counter()
    found = Found(arm.name, seed, [])
    blobs = BlobStore((scratch / "blobs").as_uri())
    teacher = str(kept(versions, arm.teacher, seed).absolute()) if arm.teacher else ""
    async with WORLDS[arm.lesson].open(seed, blobs, scratch / "versions") as world:
        for number, stage in enumerate(arm.stages):
            settings = settings_of(stage, seed, base, teacher, f"stage-{number}")
            lineage = open_lineage(settings, blobs, SystemClock())
            training = _Training(stage, seed, lineage, world, found)
            for _ in range(round(plan.steps * stage.share)):
                if not await training.step():
                    break
            version = await training.version()
            base = await training.folder()
            found.steps += lineage.state.steps
            found.health = lineage.health.stopped.reason if lineage.health.stopped else found.health
            lineage.close()
        found.scores = await world.score(version, plan.plays)
    _keep(base, kept(versions, arm.name, seed))
    found.seconds = round(time.perf_counter() - began, 1)
    return found


def _keep(version: Path, place: Path) -> None:
    """All of it at once, so that nobody learns from a half."""
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_name(f"{place.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(version, half)
    half.rename(place)


class _Training:
    def __init__(self, stage: Stage, seed: int, lineage: Lineage, world: EngineWorld[Any], found: Found) -> None:
        self._stage, self._lineage, self._world, self._found = stage, lineage, world, found
        self._chance = Random(f"{stage.algorithm} {stage.signal} {seed}")
        self._place = 0
        self.version = Newest(lineage, world)

    async def folder(self) -> Path:
        """Of the newest version."""
        checkpoint = self._lineage.saved.checkpoint
        assert checkpoint is not None
        return await self._world.folder(checkpoint.manifest)

    async def step(self) -> bool:
        """False when training has stopped itself, or when users say nothing that it learns from."""
        lineage, stop = self._lineage, threading.Event()
        version = await self.version()
        for _ in range(ROUNDS_MAX):
            made = await SIGNALS[self._stage.signal](self._world, version, EPISODES, self._chance)
            self._found.episodes += EPISODES
            for one in self._stage.change(made, self._chance):
                lineage.state.admit(one, (0, self._place), one.time)
                self._place += 1
            if items := lineage.next_batch():
                break
        else:
            return False
        measured = await asyncio.to_thread(lineage.step, items, stop)
        if not measured:
            return False
        self._found.experiences += len(items)
        await asyncio.to_thread(lambda: lineage.save(publish=True))
        return lineage.health.stopped is None
