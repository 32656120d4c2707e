"""One run of `benchmarks.learning` in one process: a lineage of the real trainer on its own, controlled traffic.

The demo's agent plays on the real engine, and its episodes become experiences as in the services. Prompts, sampling and
answers are those of `headrace_inference`, branches those of `headrace_collector`, rewards those of the demo under the
scorer's policy (`headrace_scorer`), and tasks and agent those of `examples/email_agent`. HTTP, the bus and the
databases are left out. A control changes the rewards.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import threading
import time
import tomllib
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks._engine_world import EngineWorld
from benchmarks._learning_lines import Answers, Arm, Plan, RunResult
from email_agent import mailbox, rewards, typed
from email_agent.mailbox import AGENT, Mailtools, Split, Task, stream, tasks
from example_parts.react import Agent, Episode
from headrace_collector.closing import build_trajectory
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_registry.gate.evaluation import run_trial
from headrace_registry.gate.trial import Trial
from headrace_registry.settings import GateSettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Feedback, Trajectory, Turn
from headrace_schemas.programs import Tasks
from headrace_schemas.values.base import utcnow
from headrace_scorer.feedback_entries import Corrections
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.scores import experience
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

SETTINGS = tomllib.loads(Path("examples/email_agent/headrace.toml").read_text(encoding="utf-8"))
MODEL = str(SETTINGS["trainer"]["model"])
RewardFunctions = Mapping[str, Callable[..., float | None]]
FUNCTIONS: RewardFunctions = {f"function:{name}": getattr(rewards, name) for name in ("answer", "evidence", "tool_use")}
TYPED_FUNCTIONS: RewardFunctions = {**FUNCTIONS, "function:answer": typed.answer}
"""The demo's reward functions, for an agent that answers with a call of `final_answer`."""
POLICY = RewardPolicy(SETTINGS["scorer"]["weights"], SETTINGS["scorer"]["required"])


class World(EngineWorld[Task]):
    """The mailbox of one seed, with an engine. `open` creates it."""

    agent: Agent = AGENT
    model = MODEL
    functions: RewardFunctions = FUNCTIONS

    def __init__(self, seed: int, blobs: BlobStore, folder: Path, engine: TorchEngine) -> None:
        self._box = mailbox.generate(seed)
        self.tools = Mailtools(self._box.open())
        super().__init__(seed, blobs, folder, engine)
        self.tasks = Tasks(gate=self._names("gate"), audit=self._names("audit"))
        """Task names of the gate program; with `play` the world can run a trial."""

    def questions(self, split: str) -> Iterator[Task]:
        return stream(self._box, cast(Split, split), self.seed)

    def tools_of(self, task: Task) -> Mailtools:
        return self.tools

    def is_right(self, task: Task, episode: Episode) -> bool:
        return episode.answer is not None and rewards.same_answer(episode.answer, task.expected)

    async def collect(self, version: str, episodes: int) -> list[Experience]:
        """Play episodes of the training traffic and return their experiences, in the order of the tasks."""
        runs = await self.play_all(version, list(itertools.islice(self.training_tasks, episodes)))
        return [experience for run in runs for experience in experiences_of(run.task, run.turns, self.functions)]

    async def play(self, version: str, task: str, seed: int) -> float:
        run = await self.play_once(version, self._tasks_by_id[task], seed)
        return float(self.is_right(run.task, run.episode))

    def _names(self, split: Split) -> tuple[str, ...]:
        return tuple(task.id for task in tasks(self._box, split))

    @cached_property
    def _tasks_by_id(self) -> dict[str, Task]:
        return {task.id: task for split in ("gate", "audit") for task in tasks(self._box, split)}


class TypedWorld(World):
    """The mailbox for an agent with typed answers. `tool_choice` is `required`."""

    agent = typed.TypedAgent(AGENT.system, typed.DEFINITIONS, AGENT.turns_max)
    functions = TYPED_FUNCTIONS


class FreeTypedWorld(TypedWorld):
    """Mailbox for the agent with typed answers but without a grammar, so that its calls may be malformed."""

    agent = replace(TypedWorld.agent, required=False)


def experiences_of(task: Task, turns: Sequence[Turn], functions: RewardFunctions = FUNCTIONS) -> list[Experience]:
    """Return the experiences that collector and scorer make of an episode and its feedback."""
    feedback = Feedback(
        time=utcnow(),
        feedback_id=uuid.uuid4().hex,
        session_key=turns[0].session_key,
        msg_ids=tuple(turn.turn_id for turn in turns),
        task_id=task.kind,
        context={"expected": task.expected},
    )
    run = trajectory_of(turns, [feedback])
    return scored_experiences(run, [*function_rewards(run, functions)], {}, POLICY)


def trajectory_of(turns: Sequence[Turn], feedback: Sequence[Feedback]) -> Trajectory:
    """Return the trajectory that the collector makes of a closed run and its feedback."""
    return build_trajectory(
        turns,
        superseded=(),
        about_run=feedback,
        about_session=[],
        reason="feedback",
        models=1,
        turns_from=0,
        now=utcnow(),
    )


def function_rewards(run: Trajectory, functions: RewardFunctions = FUNCTIONS) -> Iterator[SourceReward]:
    """Yield the results of the demo's reward functions for a run."""
    for name, function in functions.items():
        needs_context = name != "function:tool_use"
        yield SourceReward(name, None, "scored", function(run, run.context) if needs_context else function(run))


def scored_experiences(
    run: Trajectory, source_rewards: Sequence[SourceReward], details: Corrections, policy: RewardPolicy
) -> list[Experience]:
    """Return the experiences that the scorer makes, one for each branch."""
    return [
        experience(
            run,
            index,
            source_rewards,
            details,
            policy,
            rewarded=False,
            now=utcnow(),
            revision=0,
            task_id=run.task_id,
            run_id=run.run_id,
            parts=run.parts,
        )
        for index in range(len(run.branches))
    ]


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
        for event in changed:
            lineage.state.admit(event, (0, self._next_offset), event.time)
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
