"""Runs of trials and audits with the gate's program: they draw tasks and seeds, and limit how many plays run at once.

The filter program `python -m headrace_registry.audits` plays audit tasks without bus and database: for each input line
`measure` it prints a line `measured`. All versions play the same tasks with the same seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace_registry.gate.gate import Gate
from headrace_registry.gate.trial import Trial
from headrace_registry.settings import RegistrySettings
from headrace_registry.storage.records import TrialResult
from headrace_runtime.errors import SettingError
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_schemas.programs import MeasureRequest, MeasureResult, Tasks

T = TypeVar("T")
_SEEDS = 2**31
_SHARE_BESIDE_TRIAL = 16
"""Divisor of the concurrency that audits get during a trial: a sixteenth."""
_AHEAD = 2
"""Number of plays that may be requested before earlier ones have ended, as a multiple of `concurrency`, so that a slow
task does not delay the others."""


class PlaySession(Protocol):
    """Running gate program that can play tasks, as trials and audits use it."""

    @property
    def tasks(self) -> Tasks: ...

    async def play(self, version: str, task: str, seed: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """Scores of one version on the audit tasks. No decision depends on these tasks, so the mean score is unbiased."""

    scores: Mapping[str, float]
    """Mean score of the version on each task."""
    score: float
    plays: int
    standard_error: float | None
    """Standard error of `score` under the assumption that plays are independent; None for a single play."""

    def statistics(self) -> dict[str, float]:
        numbers = {"score": self.score, "tasks": float(self.plays)}
        return numbers if self.standard_error is None else {**numbers, "score_standard_error": self.standard_error}


def draw_tasks(tasks: Tasks, seed: str) -> Iterator[tuple[str, int]]:
    """Yield an endless sequence of gate tasks, drawn independently at random, each with a random seed. An equal `seed`
    gives an equal sequence.

    The score differences of a trial are therefore exchangeable, and their expectation is the mean over all tasks.
    """
    chance = random.Random(seed)
    while True:
        yield chance.choice(tasks.gate), chance.randrange(_SEEDS)


async def run_trial(session: PlaySession, trial: Trial, *, concurrency: int, timeout_s: float) -> TrialResult:
    """Run a trial: all its versions play tasks until the comparison is decided or `timeout_s` is over. Return the
    result.

    All versions play the same tasks, which depend only on the candidate and the trial number. Scores are added in the
    order of the draws, not of the answers. Raises the errors of `session.play`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await _play_trial(session, trial, concurrency)
    except TimeoutError:
        return trial.result("gate.timeout_s")
    return trial.result()


async def _play_trial(session: PlaySession, trial: Trial, concurrency: int) -> None:
    task_seeds = draw_tasks(session.tasks, f"{trial.candidate} {trial.number}")
    slots = asyncio.Semaphore(concurrency)
    rounds: deque[asyncio.Task[dict[str, float]]] = deque()

    async def play_one(version: str, task: str, seed: int) -> float:
        async with slots:
            return await session.play(version, task, seed)

    async def play_round(players: tuple[str, ...], task: str, seed: int) -> dict[str, float]:
        scores = await asyncio.gather(*(play_one(player, task, seed) for player in players))
        return dict(zip(players, scores, strict=True))

    try:
        while trial.state == "open":
            remaining = trial.rule.tasks_max - trial.tasks
            while len(rounds) < min(remaining, 1 + _AHEAD * concurrency // len(trial.players)):
                rounds.append(asyncio.create_task(play_round(trial.players, *next(task_seeds))))
            trial.add_scores(await rounds.popleft())
    finally:
        await _cancel(rounds)


class AuditLimiter:
    """Limit on the number of audit plays that run at once. Use `async with` around each play.

    While no trial runs, it is `concurrency`. During a trial it is a sixteenth of that, because only trials decide which
    version serves users, or half of it while audits have priority. A play that has begun is always finished.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._prioritized = False
        self._trials = 0
        self._plays = 0
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Reduce the limit for audit plays while the context is active, because a trial runs."""
        self._trials += 1
        try:
            yield
        finally:
            self._trials -= 1
            self._changed.set()

    def prioritize_audits(self, prioritized: bool) -> None:
        """Set the limit for audit plays during trials: half of `concurrency` if `prioritized`, else a sixteenth."""
        self._prioritized = prioritized
        self._changed.set()

    def _limit(self) -> int:
        if not self._trials:
            return self._concurrency
        return max(1, self._concurrency // (2 if self._prioritized else _SHARE_BESIDE_TRIAL))

    async def __aenter__(self) -> None:
        while self._plays >= self._limit():
            self._changed.clear()
            await self._changed.wait()
        self._plays += 1

    async def __aexit__(self, *_error: object) -> None:
        self._plays -= 1
        self._changed.set()


async def run_audit(session: PlaySession, version: str, *, plays: int, limiter: AuditLimiter) -> Audit:
    """Let a version play `plays` audit tasks. Return a summary of its scores."""
    return summarize_audit(await play_audit_tasks(session, version, plays, limiter=limiter))


async def play_audit_tasks(
    session: PlaySession, version: str, plays: int, *, limiter: AuditLimiter
) -> list[tuple[str, float]]:
    """Let a version play audit tasks, cyclically until there are `plays` plays. Return pairs of task and score.

    All versions get the same tasks and seeds, so that their audits can be compared. Raises the errors of
    `session.play`.
    """
    tasks = session.tasks.audit

    async def play_one(number: int) -> tuple[str, float]:
        async with limiter:
            task = tasks[number % len(tasks)]
            return task, await session.play(version, task, number)

    running = [asyncio.create_task(play_one(number)) for number in range(plays)]
    try:
        return await asyncio.gather(*running)
    finally:
        await _cancel(running)


async def _cancel(plays: Iterable[asyncio.Task[T]]) -> None:
    """Cancel plays whose scores are not needed any more, and wait until they have ended."""
    tasks = list(plays)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def summarize_audit(scores: list[tuple[str, float]]) -> Audit:
    """Return mean and standard error of the scores of an audit, and the mean score of each task."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for task, score in scores:
        by_task[task].append(score)
    count = len(scores)
    mean = math.fsum(score for _, score in scores) / count
    error = None
    if count > 1:
        error = math.sqrt(math.fsum((score - mean) ** 2 for _, score in scores) / (count - 1) / count)
    return Audit(
        {task: math.fsum(task_scores) / len(task_scores) for task, task_scores in by_task.items()}, mean, count, error
    )


async def play_audits(_common: Common, settings: RegistrySettings) -> None:
    """Run the filter program: for each version that is read from standard input, play audit tasks and print the
    scores."""
    gate = Gate(settings.gate)
    if not gate.configured:
        raise SettingError(
            "registry.gate.command", "", "is empty, so no program plays held-out tasks; see docs/gate.md"
        )
    limiter = AuditLimiter(settings.gate.concurrency)
    lines = Lines()
    async for _, value in lines.read():
        request = MeasureRequest.model_validate_json(value)
        async with gate.session() as session:
            scores = await play_audit_tasks(session, request.version, request.plays, limiter=limiter)
        measured = MeasureResult(version=request.version, scores=tuple(scores))
        lines.write("measured", measured.model_dump_json().encode())
        lines.flush()
