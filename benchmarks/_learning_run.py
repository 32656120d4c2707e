"""One run: a lineage of the real trainer, trained step by step on what a control makes of its own traffic."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._engine_world import EngineWorld
from benchmarks._learning_found import Arm, Found, Plan
from benchmarks._learning_world import MODEL, SETTINGS, World
from headrace_registry.evaluation import run_trial
from headrace_registry.settings import GateSettings
from headrace_registry.trial import Trial
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import SystemClock
from headrace_schemas import Experience
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings


def run(arm: Arm, seed: int, base: Path, plan: Plan) -> Found:
    """In a process of its own, with one thread of torch."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-learning-") as scratch:
        return asyncio.run(_run(arm, seed, base, plan, Path(scratch)))


def settings_of(arm: Arm, seed: int, base: Path, learning_rate: float) -> TrainerSettings:
    """Those of the demo, but for the learning rate; a version for each step, so that lag counts in steps, and as much
    staleness as the lag."""
    changed: dict[str, object] = {"base": str(base), "seed": seed, "steps_per_version": 1}
    changed["max_staleness"] = max(arm.lag, SETTINGS["trainer"]["max_staleness"])
    found = TrainerSettings.model_validate({**SETTINGS["trainer"], **changed}).model_dump()
    for name, value in {"trainer.optimizer.learning_rate": learning_rate, **arm.control.settings}.items():
        section = found
        *path, last = name.removeprefix("trainer.").split(".")
        for part in path:
            section = section[part]
        section[last] = value
    return TrainerSettings.model_validate(found)


async def _run(arm: Arm, seed: int, base: Path, plan: Plan, scratch: Path) -> Found:
    began = time.perf_counter()
    settings = settings_of(arm, seed, base, plan.learning_rate)
    blobs = BlobStore((scratch / "blobs").as_uri())
    lineage = open_lineage(settings, blobs, SystemClock())
    async with World.open(seed, blobs, scratch / "versions") as world:
        training = _Training(arm, seed, lineage, world)
        first = await training.version()
        found = Found(arm.name, seed, await world.score(first, plan.plays), [])
        marks = [round(plan.steps * (number + 1) / plan.traced) for number in range(plan.traced)]
        marks = marks if arm.traced else []
        since = 0
        for step in range(1, plan.steps + 1):
            if not await training.step(settings.batch_experiences):
                break
            if step in marks:
                rewards = training.rewards[since:]
                since = step
                plays = await world.score(await training.version(), plan.plays)
                found.trace.append((step, statistics.fmean(rewards), plays))
        last = await training.version()
        done = arm.traced and found.trace and found.trace[-1][0] == plan.steps
        found.scores = found.trace[-1][2] if done else await world.score(last, plan.plays)
        if arm.tried and last != first:
            found.trial = await _tried(world, last, first)
    found.steps, found.rewards = lineage.state.steps, training.rewards
    found.health = lineage.health.stopped.reason if lineage.health.stopped else None
    found.effective_sample = statistics.fmean(training.effective) if training.effective else None
    found.seconds = round(time.perf_counter() - began, 1)
    return found


class Newest:
    """The newest version of a lineage, loaded; the one before it is forgotten, except for the first."""

    def __init__(self, lineage: Lineage, world: EngineWorld[Any]) -> None:
        self._lineage, self._world = lineage, world
        self._loaded: str | None = None

    async def __call__(self) -> str:
        checkpoint = self._lineage.saved.checkpoint
        assert checkpoint is not None
        version = await self._world.load(checkpoint.manifest)
        first = self._lineage.saved.versions[0].version
        if self._loaded not in (None, version, first):
            await self._world.unload(str(self._loaded))
        self._loaded = version
        return version


class _Training:
    def __init__(self, arm: Arm, seed: int, lineage: Lineage, world: World) -> None:
        self._arm, self._lineage, self._world = arm, lineage, world
        self._chance = random.Random(f"{arm.control.name} {seed}")
        self._sampled: deque[Sequence[Experience]] = deque()
        self._place = 0
        self.version = Newest(lineage, world)
        self.rewards: list[float] = []
        self.effective: list[float] = []

    async def step(self, experiences: int) -> bool:
        """False when training has stopped itself."""
        lineage, stop = self._lineage, threading.Event()
        version = await self.version()
        while len(self._sampled) <= self._arm.lag:
            self._sampled.append(await self._world.collect(version, experiences))
        batch = [one for one in self._sampled.popleft() if one.reward is not None]
        changed = self._arm.control.change(batch, self._chance)
        for one in changed:
            lineage.state.admit(one, (0, self._place), one.time)
            self._place += 1
        items = lineage.next_batch()
        if not items:
            return False
        measured = await asyncio.to_thread(lineage.step, items, stop)
        self.rewards.append(statistics.fmean(one.reward or 0.0 for one in changed))
        self.effective.append(measured.get("effective_sample_size", 1.0))
        await asyncio.to_thread(lambda: lineage.save(publish=True))
        return True


async def _tried(world: World, candidate: str, champion: str) -> dict[str, object]:
    """What the gate says, with its default settings."""
    rule = GateSettings()
    trial = Trial(rule, 1, candidate, champion)
    result = await run_trial(world, trial, concurrency=rule.concurrency, timeout_s=rule.timeout_s)
    return {
        "passed": result.passed,
        "reason": result.reason.replace(MODEL, "").split("@")[0].strip(),
        "tasks": trial.tasks,
        "difference": result.statistics.get("difference"),
    }
