"""`practise`: steps of training on runs of tasks, each ended by what the services say and never by time."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from headrace.errors import UsageError
from headrace.practice.outcomes import OutcomeWatch
from headrace.practice.runs import Play, Run
from headrace.practice.steps import Step
from headrace.stack import Stack


async def practise(
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
    """Each step plays the next `tasks_per_step` tasks `group_size` times each, `at_once` runs at a time, and ends when
    the trainer has said of each run what became of it and the version that came of them answers, or was refused.

    After the last task the first one follows. A run whose `play` raises, or gives no reward, is an error of that run:
    it gets no reward, and its group is trained without it. Raises `Unreachable` when the services take longer than
    `timeout_s` to decide, `UsageError` when no run of a step has a reward.
    """
    if not 1 <= tasks_per_step <= len(tasks):
        raise UsageError(f"tasks_per_step = {tasks_per_step}: there are {len(tasks)} tasks, and at least 1 is wanted")
    if group_size < 1 or steps < 1 or at_once < 1:
        raise UsageError("group_size, steps and at_once are at least 1")
    watch, following = OutcomeWatch(stack), itertools.cycle(tasks)
    await watch.begin()
    async with stack.async_client() as client:
        for number in range(1, steps + 1):
            chosen = [next(following) for _ in range(tasks_per_step)]
            runs = [
                Run(stack, client, task, purpose="train", model=stack.model)
                for task in chosen
                for _ in range(group_size)
            ]
            await play_all(runs, play, at_once)
            yield await _ended(stack, watch, number, runs, timeout_s)


async def play_all(runs: Sequence[Run], play: Play, at_once: int) -> None:
    """Play every run, so many at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(run: Run) -> None:
        async with room:
            await run.played(play)

    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(one(run))


async def _ended(stack: Stack, watch: OutcomeWatch, number: int, runs: Sequence[Run], timeout_s: float) -> Step:
    judged = {run.session_ids[role]: run for run in runs for role in run.rewards if role in run.session_ids}
    if not judged:
        first = next((run.error for run in runs if run.error), "no run called the model")
        raise UsageError(f"step {number}: none of {len(runs)} runs has a reward; the first error: {first}")
    found = await watch.until_known(judged, timeout_s)
    for session, run in judged.items():
        if found[session].trajectory is None:
            run.error = run.error or "it made no call to the model"
    version = max(found.values(), key=lambda one: one.account).version
    decision = await stack.until_decided(version, timeout_s) if version is not None else None
    watch.forget(judged)
    return Step(
        number=number,
        runs=tuple(runs),
        trained=sum(one.trained for one in found.values()),
        dropped=Counter(reason for one in found.values() for reason in one.dropped),
        version=version,
        decision=decision,
        champion=await asyncio.to_thread(stack.serving),
        metrics=dict(watch.metrics),
    )
