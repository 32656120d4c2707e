"""Plays every task so many times with one version, and measures. A play that could not be played fails the evaluation:
it is no wrong answer, and leaving it out would flatter."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace_operations.evaluation.asking import Agent, Asking, Playthrough, connection, simple_agent
from headrace_operations.evaluation.intervals import Measurement, measured
from headrace_operations.evaluation.task_metrics import TaskMetric, chosen, fitting, loaded, value_of
from headrace_operations.evaluation.tasks import EvaluationTask

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9a-f]{12,64}")
Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvaluationOptions:
    """How tasks are played and measured."""

    base_url: str = "http://127.0.0.1:8000/v1"
    key: str | None = None
    metrics: tuple[str, ...] = ()
    """None: those that come with Headrace and that the tasks have something for."""
    agent: str | None = None
    """`FILE.py:NAME`, a function of a task and an `Asking`; None: the one that needs nothing."""
    plays: int = 1
    """Of each task."""
    seed: int = 0
    concurrency: int = 8
    calls_max: int = 8
    """Calls of the model in one play of the agent that needs nothing."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Goes into each request: temperature, max_tokens."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one version."""

    version: str
    tasks: int
    plays: int
    seed: int
    metrics: Mapping[str, Measurement]
    unmeasured: Mapping[str, int]
    """Plays about which a metric had nothing to say."""


class Player:
    """Plays tasks with any version, several at a time. Close it."""

    def __init__(self, options: EvaluationOptions) -> None:
        """Raises `UsageError` for an agent that cannot be loaded."""
        self._options = options
        self._agent = _agent(options)
        self._http = connection(options.base_url, options.key)

    def play(self, version: str, task: EvaluationTask, seed: int) -> Playthrough:
        """Raises `HeadraceError` when it could not be played."""
        asking = Asking(self._http, self._options.base_url, version, seed, self._options.body)
        try:
            found = self._agent(task, asking)
        except HeadraceError:
            raise
        except Exception as error:
            raise HeadraceError(f"the agent failed on task {task.name!r}: {type(error).__name__}: {error}") from error
        return found if isinstance(found, Playthrough) else Playthrough(*_parts(found))

    def close(self) -> None:
        self._http.close()


def evaluate(
    version: str,
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    tick: Tick = lambda doing, done, total: None,
) -> Evaluation:
    """Raises `UsageError` for what is no exact version, `HeadraceError` when a play fails."""
    if not _VERSION.fullmatch(version):
        raise UsageError(
            f"{version!r} is no exact version; name one as in `headrace models list`, model@3f9c2d41aa07b6e5"
        )
    metrics = chosen(options.metrics or fitting(tasks))
    player = Player(options)
    values: dict[str, dict[str, list[float]]] = {name: {} for name in metrics}
    unmeasured = dict.fromkeys(metrics, 0)
    total = len(tasks) * options.plays
    try:
        with ThreadPoolExecutor(options.concurrency) as pool:
            plays = {
                pool.submit(player.play, version, task, seed_of(task, options.seed, number)): task
                for task in tasks
                for number in range(options.plays)
            }
            try:
                for done, play in enumerate(as_completed(plays), 1):
                    task = plays[play]
                    _measure(metrics, task, play.result(), values, unmeasured)
                    tick("playing", done, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        player.close()
    found = {name: measured(ordered(of, tasks), options.seed) for name, of in values.items() if of}
    return Evaluation(version, len(tasks), total, options.seed, found, {n: c for n, c in unmeasured.items() if c})


def ordered(of: Mapping[str, list[float]], tasks: Sequence[EvaluationTask]) -> list[list[float]]:
    """By task, in the order of the file: what is drawn from it must not depend on who answered first."""
    return [sorted(of[task.name]) for task in tasks if task.name in of]


def seed_of(task: EvaluationTask, seed: int, number: int) -> int:
    """The same for every version, so that versions are compared on equal terms."""
    digest = hashlib.sha256(f"{task.name} {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _measure(
    metrics: Mapping[str, TaskMetric],
    task: EvaluationTask,
    played: Playthrough,
    values: Mapping[str, dict[str, list[float]]],
    unmeasured: dict[str, int],
) -> None:
    for name, metric in metrics.items():
        value = value_of(name, metric, task, played)
        if value is None:
            unmeasured[name] += 1
        else:
            values[name].setdefault(task.name, []).append(value)


def _agent(options: EvaluationOptions) -> Agent:
    if options.agent is None:
        return simple_agent(options.calls_max)
    path, sign, name = options.agent.rpartition(":")
    if not sign:
        raise UsageError(f"--agent {options.agent}: write FILE.py:NAME")
    return loaded(Path(path), name)


def _parts(found: object) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """What agents may return besides a `Playthrough`: messages, a text, or an object with messages in it."""
    if isinstance(found, str):
        return [{"role": "assistant", "content": found}], {}
    if isinstance(found, Mapping):
        return list(found.get("messages", ())), {name: value for name, value in found.items() if name != "messages"}
    if isinstance(found, Sequence):
        return list(found), {}
    raise HeadraceError(f"the agent returned {type(found).__name__}; messages, a text or a Playthrough is wanted")
