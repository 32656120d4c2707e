"""Evaluation of one exact version on held-out tasks: metrics with confidence intervals, and a gate program.

    result = await evaluate(stack, tasks, play, {"accuracy": is_right}, version=stack.serving())
    print(result.means["accuracy"])  # 0.71 (0.62 to 0.79, 96 plays)

All calls have the purpose `eval`, so that they are never trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from headrace.client import Client
from headrace.errors import HeadraceError, UsageError
from headrace_integrations.practice.runs import Play as PlayFunction
from headrace_integrations.practice.runs import Run, run_in_thread
from headrace_integrations.stack import Addresses, Stack
from headrace_schemas.programs import Play, PlayResult, Tasks
from headrace_schemas.values.text import plain_number
from headrace_statistics.intervals import interval

__all__ = ["EvaluatedVersion", "MetricMean", "evaluate", "interval", "serve_gate"]

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
    """Metrics of one version by name.

    A play that raised an exception is listed in `errors` and excluded from all means.
    """

    version: str
    means: Mapping[str, MetricMean]
    plays: int
    errors: tuple[str, ...]


async def evaluate(
    stack: Stack,
    tasks: Sequence[object],
    play: PlayFunction,
    metrics: Mapping[str, Measure],
    *,
    version: str | None = None,
    plays: int = 1,
    at_once: int = 16,
    confidence: float = 0.95,
) -> EvaluatedVersion:
    """Play each task `plays` times with one version, and return the mean of each metric over the results of `play`.

    Meanwhile replicas keep the version loaded.

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
    """Return the value of a metric for the result of a play, or None if the metric abstains.

    Raises:
        TypeError, ValueError: the value is not a finite number.
    """
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


def serve_gate(
    gate: Mapping[str, object],
    audit: Mapping[str, object],
    play: PlayFunction,
    score: Measure,
    *,
    base_url: str,
    lines: TextIO | None = None,
    out: TextIO | None = None,
) -> None:
    """Print the task names, then play the requests that arrive on standard input until it ends.

    Args:
        gate: tasks that decide, by name.
        audit: tasks that only measure, by name.
        play: function that plays one task with the agent.
        score: function that returns a score from 0 to 1 for the result of a play. In contrast to training, a failed
            play scores 0 here, because failures make a version worse.
        base_url: address of the gateway.
        lines: input stream; standard input by default.
        out: output stream; standard output by default.

    Raises:
        ExceptionGroup: of `HeadraceError`, as soon as a score cannot be computed. The gate then fails, so that no
            version is judged without a score.
    """
    asyncio.run(_serve(gate, audit, play, score, base_url, lines or sys.stdin, out or sys.stdout))


async def _serve(
    gate: Mapping[str, object],
    audit: Mapping[str, object],
    play: PlayFunction,
    score: Measure,
    base_url: str,
    lines: TextIO,
    out: TextIO,
) -> None:
    tasks, output_lock = {**gate, **audit}, asyncio.Lock()
    print(Tasks(gate=tuple(gate), audit=tuple(audit)).model_dump_json(), file=out, flush=True)
    with Client(base_url) as root:
        stack = Stack(Addresses(gateway=root.root), "")
    async with stack.async_client() as client, asyncio.TaskGroup() as plays:

        async def play_request(request: Play) -> None:
            run = Run(stack, client, tasks[request.task], purpose="eval", model=request.version, needs_reward=False)
            await run.execute(play)
            try:
                value = 0.0 if run.error else await measure_value(score, run.task, run.result)
            except Exception as error:
                raise HeadraceError(f"task {request.task}: the score function failed: {error}") from error
            if value is None:
                raise HeadraceError(
                    f"task {request.task}: the score function returned None; return a number for each play of a gate"
                )
            result = PlayResult(version=request.version, task=request.task, seed=request.seed, score=value)
            async with output_lock:
                print(result.model_dump_json(), file=out, flush=True)

        requests = _read_in_thread(lines)
        while line := await requests.get():
            plays.create_task(play_request(Play.model_validate_json(line)))


def _read_in_thread(lines: TextIO) -> asyncio.Queue[str]:
    """Read lines in a thread and put each into the returned queue. An empty line marks the end of the input.

    The thread is never joined, because it may block until the registry closes the input, while the registry waits for
    this program.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        with contextlib.suppress(
            RuntimeError, ValueError
        ):  # at the end of the program, its loop or its input is closed
            while line := lines.readline():
                loop.call_soon_threadsafe(queue.put_nowait, line)
            loop.call_soon_threadsafe(queue.put_nowait, "")

    threading.Thread(target=read, name="gate-input", daemon=True).start()
    return queue
