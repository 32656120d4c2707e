"""`evaluate`: play tasks with one version and measure metrics of the results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.practice.agents import run_in_thread
from headrace_integrations.practice.runs import Play, Run
from headrace_integrations.stack import Stack
from headrace_schemas.values.plain_values import plain_number
from headrace_statistics.intervals import interval

Measure = Callable[[Any, Any], float | bool | Awaitable[float | bool | None] | None]
"""A metric of one play: `measure(task, result)`. A result of None abstains."""


@dataclass(frozen=True, slots=True)
class MetricMean:
    """Mean of one metric over plays.

    Attributes:
        interval: confidence interval of the mean.
        plays: number of plays with a value. Plays without a value are never counted as 0.
        abstained: number of plays for which the metric returned None.
        failed: number of plays for which the metric raised an exception.
    """

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
    """Metrics of one version by name. A play that raised is listed in `errors` and excluded from all means."""

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
    """Play each task `plays` times with one version and return metrics of the results of `play`.

    Replicas keep the version loaded in the meantime.

    Args:
        version: exact version to evaluate; by default the version that serves now.
        at_once: number of concurrent plays.
        confidence: level of the confidence intervals.

    Raises:
        UsageError: arguments are invalid, or every play failed.
    """
    from headrace_integrations.practice.training import play_all

    exact_version = version or stack.serving()
    if exact_version is None or "@" not in exact_version:
        raise UsageError(f"version = {version!r}: name an exact version, such as {stack.model}@0123456789abcdef")
    if not tasks or not metrics or plays < 1:
        raise UsageError(
            "tasks, metrics and plays: must not be empty or 0; pass at least one task, one metric and plays=1"
        )
    await stack.hold(exact_version)
    async with stack.async_client() as client:
        runs = [
            Run(stack, client, task, purpose="eval", model=exact_version, needs_reward=False)
            for task in tasks
            for _ in range(plays)
        ]
        await play_all(runs, play, at_once)
    finished_runs = [run for run in runs if run.error is None]
    errors = tuple(run.error for run in runs if run.error is not None)
    if not finished_runs:
        raise UsageError(f"all {len(runs)} plays failed; the first error: {errors[0]}")
    means = {name: await _mean(measure, finished_runs, confidence) for name, measure in metrics.items()}
    return EvaluatedVersion(exact_version, means, len(runs), errors)


async def _mean(measure: Measure, runs: Sequence[Run], confidence: float) -> MetricMean:
    values: list[float] = []
    abstained = failed = 0
    for run in runs:
        try:
            value = await measure_value(measure, run.task, run.result)
        except Exception:  # noqa: BLE001 (a user's metric may raise anything; it is counted and shown)
            failed += 1
            continue
        if value is None:
            abstained += 1
        else:
            values.append(value)
    mean = math.fsum(values) / len(values) if values else None
    return MetricMean(mean, interval(values, confidence), len(values), abstained, failed)


async def measure_value(measure: Measure, task: object, result: object) -> float | None:
    """Return the value of a metric, or None if it abstains. Raises `TypeError` and `ValueError` for values that are not
    finite numbers."""
    value: Any = (
        await measure(task, result)
        if inspect.iscoroutinefunction(measure)
        else await run_in_thread(lambda: measure(task, result))
    )
    if value is None:
        return None
    try:
        return plain_number(value)
    except ValueError as error:
        raise ValueError(f"value of a metric: must be a finite number: {error}") from None
