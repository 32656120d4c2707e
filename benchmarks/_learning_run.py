"""One run of `benchmarks.learning`: a lineage of the real trainer, trained on its own traffic as a control changes
it."""

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
from benchmarks._learning_lines import Answers, Arm, Plan, RunResult
from benchmarks._learning_world import MODEL, SETTINGS, FreeTypedWorld, TypedWorld, World
from headrace_registry.gate.evaluation import run_trial
from headrace_registry.gate.trial import Trial
from headrace_registry.settings import GateSettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

WORLDS: dict[Answers, type[World]] = {"bare": World, "free": FreeTypedWorld, "held": TypedWorld}


def run(arm: Arm, seed: int, base: Path, plan: Plan) -> RunResult:
    """Run one arm in a process of its own, with one torch thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-learning-") as scratch:
        return asyncio.run(_run(arm, seed, base, plan, Path(scratch)))


def settings_of(arm: Arm, seed: int, base: Path, learning_rate: float) -> TrainerSettings:
    """Return the demo's settings with another learning rate.

    Each step makes a version, so that the lag counts steps, and the maximum staleness is at least the lag.
    """
    changed: dict[str, object] = {"base": str(base), "seed": seed, "steps_per_version": 1}
    changed["max_staleness"] = max(arm.lag, SETTINGS["trainer"]["max_staleness"])
    table = TrainerSettings.model_validate({**SETTINGS["trainer"], **changed}).model_dump()
    for name, value in {"trainer.optimizer.learning_rate": learning_rate, **arm.control.settings}.items():
        section = table
        *path, last = name.removeprefix("trainer.").split(".")
        for part in path:
            section = section[part]
        section[last] = value
    return TrainerSettings.model_validate(table)


async def _run(arm: Arm, seed: int, base: Path, plan: Plan, scratch: Path) -> RunResult:
    began = time.perf_counter()
    settings = settings_of(arm, seed, base, plan.learning_rate)
    blobs = BlobStore((scratch / "blobs").as_uri())
    lineage = open_lineage(settings, blobs, SystemClock())
    async with WORLDS[arm.answers].open(seed, blobs, scratch / "versions") as world:
        training = _Training(arm, seed, lineage, world)
        first = await training.version()
        result = RunResult(arm.name, seed, await world.score(first, plan.plays), [])
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
                result.trace.append((step, statistics.fmean(rewards), plays))
        last = await training.version()
        is_scored = arm.traced and result.trace and result.trace[-1][0] == plan.steps
        result.scores = result.trace[-1][2] if is_scored else await world.score(last, plan.plays)
        if arm.runs_gate and last != first:
            result.trial = await _run_gate_trial(world, last, first)
    result.steps, result.rewards = lineage.state.steps, training.rewards
    result.health = lineage.health.stopped.reason if lineage.health.stopped else None
    result.effective_sample = statistics.fmean(training.effective) if training.effective else None
    result.seconds = round(time.perf_counter() - began, 1)
    return result


class NewestVersion:
    """Loader of a lineage's newest version. The loader unloads the previous version, except for the first one."""

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
        self._next_offset = 0
        self.version = NewestVersion(lineage, world)
        self.rewards: list[float] = []
        self.effective: list[float] = []

    async def step(self, experiences: int) -> bool:
        """Take one training step. Return False if training stopped itself."""
        lineage, stop = self._lineage, threading.Event()
        version = await self.version()
        while len(self._sampled) <= self._arm.lag:
            self._sampled.append(await self._world.collect(version, experiences))
        batch = [experience for experience in self._sampled.popleft() if experience.reward is not None]
        changed = self._arm.control.change(batch, self._chance)
        for experience in changed:
            lineage.state.admit(experience, (0, self._next_offset), experience.time)
            self._next_offset += 1
        items = lineage.next_batch()
        if not items:
            return False
        metrics = await asyncio.to_thread(lineage.step, items, stop)
        self.rewards.append(statistics.fmean(experience.reward or 0.0 for experience in changed))
        self.effective.append(metrics.get("effective_sample_size", 1.0))
        await asyncio.to_thread(lambda: lineage.save(publish=True))
        return True


async def _run_gate_trial(world: World, candidate: str, champion: str) -> dict[str, object]:
    """Return the result of a trial with the gate's default settings."""
    rule = GateSettings()
    trial = Trial(rule, 1, candidate, champion)
    result = await run_trial(world, trial, concurrency=rule.concurrency, timeout_s=rule.timeout_s)
    return {
        "passed": result.passed,
        "reason": result.reason.replace(MODEL, "").split("@")[0].strip(),
        "tasks": trial.tasks,
        "difference": result.statistics.get("difference"),
    }
