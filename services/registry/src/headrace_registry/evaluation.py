"""Runs a trial or an audit with the gate's program: draws tasks and seeds, and bounds how many plays run at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace_registry.records import TrialResult
from headrace_registry.trial import Trial
from headrace_schemas.gate import Tasks

T = TypeVar("T")
_SEEDS = 2**31
_SHARE_BESIDE_TRIAL = 8
"""An audit beside a trial has one of so many plays."""
_AHEAD = 2
"""Plays that may be requested ahead, as a multiple of `concurrency`: a slow task does not hold up others."""


class PlaySession(Protocol):
    """A session with the gate's program, as trials and audits use it."""

    @property
    def tasks(self) -> Tasks: ...

    async def play(self, version: str, task: str, seed: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """The scores of one version on audit tasks. Audit tasks take part in no decision, so the mean is unbiased."""

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
    """An endless sequence of independent gate tasks and seeds. So the differences of a trial are exchangeable, and each
    has the mean over all tasks. Equal seeds give equal draws.
    """
    chance = random.Random(seed)
    while True:
        yield chance.choice(tasks.gate), chance.randrange(_SEEDS)


async def run_trial(session: PlaySession, trial: Trial, *, concurrency: int, timeout_s: float) -> TrialResult:
    """Play `trial` to its end. All versions play the same tasks, which depend only on candidate and trial number.

    Scores are taken in the order of the draws, not of the answers. Raises what `play` raises.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await _play(session, trial, concurrency)
    except TimeoutError:
        return trial.result("gate.timeout_s")
    return trial.result()


async def _play(session: PlaySession, trial: Trial, concurrency: int) -> None:
    chosen = draws(session.tasks, f"{trial.candidate} {trial.number}")
    room = asyncio.Semaphore(concurrency)
    ahead: deque[asyncio.Task[dict[str, float]]] = deque()

    async def one(player: str, task: str, seed: int) -> float:
        async with room:
            return await session.play(player, task, seed)

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


class AuditRoom:
    """Bounds how many plays of audits run at once: `async with` it around each play.

    At most `concurrency` run while no trial does, and an eighth of that beside one: a trial decides what is served, and
    an audit decides nothing. Plays that have begun are finished, so none of them is lost or counted twice.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._beside = max(1, concurrency // _SHARE_BESIDE_TRIAL)
        self._trials = 0
        self._plays = 0
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Leave most plays to the trial that the body runs."""
        self._trials += 1
        try:
            yield
        finally:
            self._trials -= 1
            self._changed.set()

    async def __aenter__(self) -> None:
        while self._plays >= (self._beside if self._trials else self._concurrency):
            self._changed.clear()
            await self._changed.wait()
        self._plays += 1

    async def __aexit__(self, *_error: object) -> None:
        self._plays -= 1
        self._changed.set()


async def run_audit(session: PlaySession, version: str, *, plays: int, room: AuditRoom) -> Audit:
    """Play audit tasks with one version and sum up the scores."""
    return summary(await played(session, version, plays, room=room))


async def played(session: PlaySession, version: str, plays: int, *, room: AuditRoom) -> list[tuple[str, float]]:
    """Play `plays` audit tasks in turn. Returns each task with its score. Every version gets the same tasks and seeds,
    so that audits can be compared. Raises what `play` raises.
    """
    tasks = session.tasks.audit

    async def one(number: int) -> tuple[str, float]:
        async with room:
            task = tasks[number % len(tasks)]
            return task, await session.play(version, task, number)

    running = [asyncio.create_task(one(number)) for number in range(plays)]
    try:
        return await asyncio.gather(*running)
    finally:
        await _given_up(running)


async def _given_up(plays: Iterable[asyncio.Task[T]]) -> None:
    """Cancel plays that are no longer needed."""
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
