"""`evaluate`: tasks times metrics on one version."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.evaluation.intervals import interval
from headrace.practice.agents import in_thread
from headrace.practice.runs import Play, Run
from headrace.stack import Stack
from headrace_schemas.plain_values import plain_number

Measure = Callable[[Any, Any], float | bool | Awaitable[float | bool | None] | None]
"""A metric of one play: `measure(task, result)`. None abstains."""


@dataclass(frozen=True, slots=True)
class MetricMean:
    """`mean` and `interval` are over `plays`; `abstained` counts plays without a value, `failed` errors of the metric
    itself. None of these is a 0."""

    mean: float | None
    interval: tuple[float, float] | None
    plays: int
    abstained: int = 0
    failed: int = 0

    def __str__(self) -> str:
        if self.mean is None:
            return f"no value ({self.abstained} abstained, {self.failed} failed)"
        bounds = f"{self.interval[0]:.3g} to {self.interval[1]:.3g}, " if self.interval else ""
        return f"{self.mean:.3g} ({bounds}{self.plays} plays)"


@dataclass(frozen=True, slots=True)
class EvaluatedVersion:
    """`means` by metric. A play that raised is in `errors` and in no mean: look at both."""

    version: str
    means: Mapping[str, MetricMean]
    plays: int
    errors: tuple[str, ...]


async def evaluate(
    stack: Stack,
    tasks: Sequence[object],
    play: Play,
    metrics: Mapping[str, Measure],
    *,
    version: str | None = None,
    plays: int = 1,
    at_once: int = 16,
    confidence: float = 0.95,
) -> EvaluatedVersion:
    """Play each task `plays` times with one version (the one that serves now) and measure what `play` returns.

    Replicas keep the version ready meanwhile. Raises `UsageError` when no play came to an end.
    """
    from headrace.practice.practising import play_all

    wanted = version or stack.serving()
    if wanted is None or "@" not in wanted:
        raise UsageError(f"version = {version!r}: name an exact version, such as {stack.model}@0123456789abcdef")
    if not tasks or not metrics or plays < 1:
        raise UsageError("an evaluation needs tasks, metrics and at least one play of each task")
    await stack.hold(wanted)
    async with stack.async_client() as client:
        runs = [
            Run(stack, client, task, purpose="eval", model=wanted, needs_reward=False)
            for task in tasks
            for _ in range(plays)
        ]
        await play_all(runs, play, at_once)
    done = [run for run in runs if run.error is None]
    errors = tuple(run.error for run in runs if run.error is not None)
    if not done:
        raise UsageError(f"none of {len(runs)} plays came to an end; the first error: {errors[0]}")
    means = {name: await _mean(measure, done, confidence) for name, measure in metrics.items()}
    return EvaluatedVersion(wanted, means, len(runs), errors)


async def _mean(measure: Measure, runs: Sequence[Run], confidence: float) -> MetricMean:
    values: list[float] = []
    abstained = failed = 0
    for run in runs:
        try:
            value = await measured(measure, run.task, run.result)
        except Exception:  # noqa: BLE001 (a user's metric may raise anything; it is counted and shown)
            failed += 1
            continue
        if value is None:
            abstained += 1
        else:
            values.append(value)
    mean = math.fsum(values) / len(values) if values else None
    return MetricMean(mean, interval(values, confidence), len(values), abstained, failed)


async def measured(measure: Measure, task: object, result: object) -> float | None:
    """One value. Raises `TypeError` and `ValueError` for what is no finite number."""
    found: Any = (
        await measure(task, result)
        if inspect.iscoroutinefunction(measure)
        else await in_thread(lambda: measure(task, result))
    )
    if found is None:
        return None
    try:
        return plain_number(found)
    except ValueError as error:
        raise ValueError(f"a metric is a finite number: {error}") from None
