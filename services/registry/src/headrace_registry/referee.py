"""Has a trial or an audit played by the gate's program: draws tasks and seeds, and lets so many plays be under way."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace_registry.records import Verdict
from headrace_registry.trial import Trial
from headrace_schemas.gate import Tasks

T = TypeVar("T")
_SEEDS = 2**31
_AHEAD = 2
"""How many times `concurrency` plays are asked for before the first of them is answered: a slow task holds up no
others."""


class Court(Protocol):
    """A session with the gate's program, as the referee sees it."""

    @property
    def tasks(self) -> Tasks: ...

    async def play(self, version: str, task: str, seed: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """What the audit tasks say of one version. They chose nothing, so the mean is unbiased, of whatever was chosen."""

    scores: Mapping[str, float]
    """Mean score of each task."""
    score: float
    plays: int
    standard_error: float | None
    """Of `score`, as if plays were independent; None for a single play."""

    def statistics(self) -> dict[str, float]:
        numbers = {"score": self.score, "tasks": float(self.plays)}
        return numbers if self.standard_error is None else {**numbers, "score_standard_error": self.standard_error}


def draws(tasks: Tasks, seed: str) -> Iterator[tuple[str, int]]:
    """Gate tasks and seeds without end, independent of each other: what makes the differences of a trial exchangeable,
    each with the mean over all tasks. Equal seeds give equal draws.
    """
    chance = random.Random(seed)
    while True:
        yield chance.choice(tasks.gate), chance.randrange(_SEEDS)


async def judge(court: Court, trial: Trial, *, concurrency: int, timeout_s: float) -> Verdict:
    """Play `trial` to its end. Its tasks are the same for everybody who plays, and depend on candidate and trial alone.

    Scores are taken in the order of the draws, not in that of the answers. Raises what `play` raises.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await _play(court, trial, concurrency)
    except TimeoutError:
        return trial.verdict("gate.timeout_s")
    return trial.verdict()


async def _play(court: Court, trial: Trial, concurrency: int) -> None:
    chosen = draws(court.tasks, f"{trial.candidate} {trial.number}")
    room = asyncio.Semaphore(concurrency)
    ahead: deque[asyncio.Task[dict[str, float]]] = deque()

    async def one(player: str, task: str, seed: int) -> float:
        async with room:
            return await court.play(player, task, seed)

    async def everybody(players: tuple[str, ...], task: str, seed: int) -> dict[str, float]:
        scores = await asyncio.gather(*(one(player, task, seed) for player in players))
        return dict(zip(players, scores, strict=True))

    try:
        while trial.state == "open":
            left = trial.rule.tasks_max - trial.tasks
            while len(ahead) < min(left, 1 + _AHEAD * concurrency // len(trial.players)):
                ahead.append(asyncio.create_task(everybody(trial.players, *next(chosen))))
            trial.take(await ahead.popleft())
    finally:
        await _given_up(ahead)


async def audit(court: Court, version: str, *, plays: int, concurrency: int) -> Audit:
    """What `played` says of one version, summed up."""
    return summary(await played(court, version, plays, concurrency=concurrency))


async def played(court: Court, version: str, plays: int, *, concurrency: int) -> list[tuple[str, float]]:
    """Play audit tasks in turn, as many as asked for, and say which task had which score: the same tasks and seeds for
    every version, so that audits can be compared. Raises what `play` raises.
    """
    tasks = court.tasks.audit
    room = asyncio.Semaphore(concurrency)

    async def one(number: int) -> tuple[str, float]:
        async with room:
            task = tasks[number % len(tasks)]
            return task, await court.play(version, task, number)

    running = [asyncio.create_task(one(number)) for number in range(plays)]
    try:
        return await asyncio.gather(*running)
    finally:
        await _given_up(running)


async def _given_up(plays: Iterable[asyncio.Task[T]]) -> None:
    """What is still under way is of no use any more."""
    tasks = list(plays)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def summary(scores: list[tuple[str, float]]) -> Audit:
    """Of at least one play."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for task, score in scores:
        by_task[task].append(score)
    count = len(scores)
    mean = math.fsum(score for _, score in scores) / count
    error = None
    if count > 1:
        error = math.sqrt(math.fsum((score - mean) ** 2 for _, score in scores) / (count - 1) / count)
    return Audit({task: math.fsum(found) / len(found) for task, found in by_task.items()}, mean, count, error)
