"""Plays every task several times with one version, and computes metrics with 95 % confidence intervals.

A play that fails makes the whole evaluation fail: it is not a wrong answer, and leaving it out would bias the mean.
`serve` plays tasks as a gate program (docs/gate.md): it sends the names of the tasks, then the score of each requested
play.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from headrace.errors import HeadraceError, UsageError
from headrace_operations.evaluation.measures import (
    TaskMetric,
    applicable_metrics,
    compute_metric,
    load_function,
    load_metrics,
)
from headrace_operations.evaluation.tasks import (
    Agent,
    EvaluationTask,
    ModelClient,
    Playthrough,
    connection,
    simple_agent,
    splits,
)
from headrace_schemas.programs import Play
from headrace_statistics.intervals import wilson

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Measurement:
    """Mean of a metric with its confidence interval. `count` is the number of values, `tasks` that of their tasks."""

    mean: float
    low: float
    high: float
    count: int
    tasks: int
    interval: str


def bootstrap(by_task: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean (Efron 1979).

    Tasks are resampled together with all of their plays. Plays of one task are correlated, so resampling single plays
    would make the interval too narrow.

    Args:
        by_task: values by task.
        seed: seed of the random choices.
    """
    generator = random.Random(f"bootstrap {seed}")
    means = []
    for _ in range(RESAMPLES):
        sample = generator.choices(by_task, k=len(by_task))
        means.append(sum(map(sum, sample)) / sum(map(len, sample)))
    means.sort()
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]


def measure(by_task: Sequence[Sequence[float]], seed: int) -> Measurement:
    """Return the mean of a metric with its interval: Wilson's for binary values of one play per task, else the
    bootstrap.

    Args:
        by_task: values of the metric by task.
        seed: seed of the bootstrap.
    """
    values = [value for plays in by_task for value in plays]
    single = all(len(plays) == 1 for plays in by_task)
    if single and all(value in (0.0, 1.0) for value in values):
        low, high = wilson(round(sum(values)), len(values))
        return Measurement(fmean(values), low, high, len(values), len(by_task), "wilson")
    low, high = bootstrap(by_task, seed)
    return Measurement(fmean(values), low, high, len(values), len(by_task), "bootstrap")


_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9a-f]{12,64}")
Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvaluationOptions:
    """Options that determine how tasks are played and measured."""

    base_url: str = "http://127.0.0.1:8000/v1"
    key: str | None = None
    metrics: tuple[str, ...] = ()
    """Names of metrics; empty selects the built-in metrics whose columns the tasks have."""
    agent: str | None = None
    """Custom agent as `FILE.py:NAME`, a function of a task and a `ModelClient`; None is the built-in agent."""
    plays: int = 1
    """Number of plays of each task."""
    seed: int = 0
    concurrency: int = 8
    calls_max: int = 8
    """Maximum number of model calls in one play of the built-in agent."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request, such as temperature and max_tokens."""


@dataclass(frozen=True)
class Evaluation:
    """Measurements of one version by metric, and the plays that they are based on."""

    version: str
    tasks: int
    plays: int
    seed: int
    metrics: Mapping[str, Measurement]
    unmeasured: Mapping[str, int]
    """Number of plays, by metric, for which the metric returned None."""


class Player:
    """Runs the agent on evaluation tasks with any version, also from several threads. The caller must close it."""

    def __init__(self, options: EvaluationOptions) -> None:
        """Load the agent and open the client.

        Raises:
            UsageError: the agent cannot be loaded.
        """
        self._options = options
        self._agent = _agent(options)
        self._http = connection(options.base_url, options.key)

    def play(self, version: str, task: EvaluationTask, seed: int) -> Playthrough:
        """Run the agent on one task with a version, and return the conversation.

        Raises:
            HeadraceError: the task could not be played.
        """
        model = ModelClient(self._http, self._options.base_url, version, seed, self._options.body)
        try:
            result = self._agent(task, model)
        except HeadraceError:
            raise
        except Exception as error:
            raise HeadraceError(f"the agent failed on task {task.name!r}: {type(error).__name__}: {error}") from error
        return result if isinstance(result, Playthrough) else Playthrough(*_playthrough_parts(result))

    def close(self) -> None:
        self._http.close()


def evaluate(
    version: str,
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    tick: Tick = lambda activity, completed, total: None,
) -> Evaluation:
    """Play all tasks and measure the metrics.

    Raises:
        UsageError: `version` is not an exact version, or a metric or the agent cannot be loaded.
        HeadraceError: a play failed.
    """
    if not _VERSION.fullmatch(version):
        raise UsageError(
            f"{version!r} is not an exact version; use one of `headrace models list`, such as model@3f9c2d41aa07b6e5"
        )
    metrics = load_metrics(options.metrics or applicable_metrics(tasks))
    player = Player(options)
    values: dict[str, dict[str, list[float]]] = {name: {} for name in metrics}
    unmeasured = dict.fromkeys(metrics, 0)
    total = len(tasks) * options.plays
    try:
        with ThreadPoolExecutor(options.concurrency) as pool:
            plays = {
                pool.submit(player.play, version, task, play_seed(task, options.seed, number)): task
                for task in tasks
                for number in range(options.plays)
            }
            try:
                for completed, play in enumerate(as_completed(plays), 1):
                    task = plays[play]
                    _measure(metrics, task, play.result(), values, unmeasured)
                    tick("playing", completed, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        player.close()
    measurements = {
        name: measure(values_by_task(by_name, tasks), options.seed) for name, by_name in values.items() if by_name
    }
    return Evaluation(
        version, len(tasks), total, options.seed, measurements, {n: c for n, c in unmeasured.items() if c}
    )


def values_by_task(by_name: Mapping[str, list[float]], tasks: Sequence[EvaluationTask]) -> list[list[float]]:
    """Return the values of each task in the order of the file, so that resampling does not depend on answer times."""
    return [sorted(by_name[task.name]) for task in tasks if task.name in by_name]


def play_seed(task: EvaluationTask, seed: int, number: int) -> int:
    """Return the seed of one play, which is the same for every version, so that comparisons between versions are
    paired.
    """
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
        value = compute_metric(name, metric, task, played)
        if value is None:
            unmeasured[name] += 1
        else:
            values[name].setdefault(task.name, []).append(value)


def _agent(options: EvaluationOptions) -> Agent:
    if options.agent is None:
        return simple_agent(options.calls_max)
    path, sign, name = options.agent.rpartition(":")
    if not sign:
        raise UsageError(f"--agent {options.agent}: the form is FILE.py:NAME")
    return load_function(Path(path), name)


def _playthrough_parts(result: object) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the messages and the fields in the result of an agent: messages, a text, or an object with messages."""
    if isinstance(result, str):
        return [{"role": "assistant", "content": result}], {}
    if isinstance(result, Mapping):
        return list(result.get("messages", ())), {name: value for name, value in result.items() if name != "messages"}
    if isinstance(result, Sequence):
        return list(result), {}
    raise HeadraceError(f"the agent returned {type(result).__name__}; it must return messages, a text or a Playthrough")


def serve(
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    source: TextIO | None = None,
    target: TextIO | None = None,
) -> None:
    """Play the requested tasks and write a score for each play, until the input ends.

    Args:
        tasks: the tasks of the file.
        options: the metric, the agent and the gateway.
        source: the input with one `Play` per line; by default standard input.
        target: the output; by default standard output.

    Raises:
        UsageError: `options` does not name exactly one metric.
        HeadraceError: a play has no score. The registry then starts the trial again, because a failure is not a wrong
            answer.
    """
    if len(options.metrics) != 1:
        raise UsageError(f"--metric: a gate has exactly one score, but {len(options.metrics)} metrics were given")
    ((name, metric),) = load_metrics(options.metrics).items()
    by_name = {task.name: task for task in tasks}
    output, lock = target or sys.stdout, threading.Lock()
    failures: list[Exception] = []
    names = splits(tasks)

    def answer(play: Play) -> None:
        try:
            score = compute_metric(
                name, metric, by_name[play.task], player.play(play.version, by_name[play.task], play.seed)
            )
            if score is None or not 0 <= score <= 1:
                raise HeadraceError(f"{name} = {score} on task {play.task!r}: scores of a gate must be in 0..1")
            line = json.dumps({"version": play.version, "task": play.task, "seed": play.seed, "score": score})
            with lock:
                output.write(line + "\n")
                output.flush()
        except Exception as error:  # noqa: BLE001 (the reading loop raises it)
            failures.append(error)

    player = Player(options)
    output.write(json.dumps(names) + "\n")
    output.flush()
    try:
        with ThreadPoolExecutor(options.concurrency) as pool:
            for line in source or sys.stdin:
                if failures:
                    break
                pool.submit(answer, Play.model_validate_json(line))
    finally:
        player.close()
    if failures:
        raise failures[0]
