"""`train_on_tasks`: training steps on runs of tasks. `Step` has the outcomes that the services report."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import UsageError
from headrace_integrations.practice.outcomes import OutcomeWatch
from headrace_integrations.practice.runs import Play, Run
from headrace_integrations.stack import Stack


@dataclass(frozen=True)
class Step:
    """Result of one training step.

    Attributes:
        number: number of the step, from 1.
        trained: number of trained experiences.
        dropped: counts of dropped experiences by reason.
        version: version that was trained on the runs, or None if the trainer makes a version after several steps.
        decision: the registry's decision about `version`.
        champion: version that serves after the step.
    """

    number: int
    runs: tuple[Run, ...]
    trained: int
    dropped: Mapping[str, int] = field(default_factory=Counter)
    version: str | None = None
    decision: str | None = None
    champion: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the trainer: loss, entropy, gradient norm and others."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors of the runs that failed and have no reward."""
        return tuple(run.error for run in self.runs if run.error is not None)

    @property
    def reward_mean(self) -> float | None:
        """Mean over the runs that have a reward, or None if there are none."""
        return mean([run.value for run in self.runs if run.value is not None])

    @property
    def run_metrics(self) -> dict[str, float]:
        """Mean of each metric over the runs that reported it."""
        names = {name for run in self.runs for name in run.metrics}
        means = {name: mean([run.metrics[name] for run in self.runs if name in run.metrics]) for name in sorted(names)}
        return {name: value for name, value in means.items() if value is not None}


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


async def train_on_tasks(
    stack: Stack,
    tasks: Sequence[object],
    play: Play,
    *,
    group_size: int = 8,
    tasks_per_step: int = 8,
    steps: int = 1,
    at_once: int = 16,
    timeout_s: float = 600.0,
) -> AsyncIterator[Step]:
    """Train on tasks step by step and yield the result of each step.

    Each step plays the next `tasks_per_step` tasks `group_size` times each. It ends when the trainer has reported the
    outcome of each run and the resulting version serves or was refused. After the last task follows the first one
    again. A run whose `play` raises or gives no reward fails: it gets no reward, and its group is trained without it.

    Args:
        play: plays one run of the agent on a task.
        at_once: number of concurrent runs.
        timeout_s: limit for the services to report the outcomes of a step.

    Raises:
        Unreachable: outcomes are missing after `timeout_s`.
        UsageError: no run of a step has a reward.
    """
    if not 1 <= tasks_per_step <= len(tasks):
        raise UsageError(f"tasks_per_step = {tasks_per_step}: must be from 1 to the number of tasks, {len(tasks)}")
    if group_size < 1 or steps < 1 or at_once < 1:
        raise UsageError("group_size, steps and at_once: must be at least 1")
    watch, next_tasks = OutcomeWatch(stack), itertools.cycle(tasks)
    await watch.begin()
    async with stack.async_client() as client:
        for number in range(1, steps + 1):
            step_tasks = [next(next_tasks) for _ in range(tasks_per_step)]
            runs = [
                Run(stack, client, task, purpose="train", model=stack.model)
                for task in step_tasks
                for _ in range(group_size)
            ]
            await play_all(runs, play, at_once)
            yield await _finish_step(stack, watch, number, runs, timeout_s)


practise = train_on_tasks
"""Earlier name of `train_on_tasks`."""


async def play_all(runs: Sequence[Run], play: Play, at_once: int) -> None:
    """Play all runs, `at_once` of them concurrently."""
    slots = asyncio.Semaphore(at_once)

    async def play_run(run: Run) -> None:
        async with slots:
            await run.execute(play)

    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(play_run(run))


async def _finish_step(stack: Stack, watch: OutcomeWatch, number: int, runs: Sequence[Run], timeout_s: float) -> Step:
    rewarded_runs = {run.session_ids[role]: run for run in runs for role in run.rewards if role in run.session_ids}
    if not rewarded_runs:
        first_error = next((run.error for run in runs if run.error), "no run called the model")
        raise UsageError(f"step {number}: none of {len(runs)} runs has a reward; the first error: {first_error}")
    outcomes = await watch.until_known(rewarded_runs, timeout_s)
    for session, run in rewarded_runs.items():
        if outcomes[session].trajectory is None:
            run.error = run.error or "it made no call to the model"
    version = max(outcomes.values(), key=lambda outcome: outcome.account).version
    decision = await stack.until_decided(version, timeout_s) if version is not None else None
    watch.forget(rewarded_runs)
    return Step(
        number=number,
        runs=tuple(runs),
        trained=sum(outcome.trained for outcome in outcomes.values()),
        dropped=Counter(reason for outcome in outcomes.values() for reason in outcome.dropped),
        version=version,
        decision=decision,
        champion=await asyncio.to_thread(stack.serving),
        metrics=dict(watch.metrics),
    )
