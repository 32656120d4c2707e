"""Metrics of tasks by name: plug-ins of the group `headrace.task_metrics`, and functions in files.

A metric is a function of a task and its playthrough. It returns a number, a boolean, or None if the task has no column
that it could measure. None is left out of the mean and counted; it is not a zero.
"""

from __future__ import annotations

import importlib.util
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace_operations.evaluation.asking import Playthrough
from headrace_operations.evaluation.tasks import EvaluationTask
from headrace_runtime.registries import PluginError, Registry
from headrace_schemas.values.plain_values import plain_number

Compute = Callable[[EvaluationTask, Playthrough], object]
"""Custom function; its result is validated."""


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """A metric. `reads` is the task column that it requires; empty if it requires none."""

    compute: Compute
    reads: str = ""


TASK_METRICS: Registry[TaskMetric] = Registry("task_metrics", TaskMetric, "metric")


def load_metrics(names: Iterable[str]) -> dict[str, TaskMetric]:
    """Load metrics by plug-in name or as `FILE.py:NAME`.

    Raises:
        UsageError: a metric does not exist or cannot be loaded.
    """
    metrics = {}
    for name in names:
        path, sign, function = name.rpartition(":")
        if sign and path.endswith(".py"):
            metrics[function] = TaskMetric(load_function(Path(path), function))
        else:
            try:
                metrics[name] = TASK_METRICS.get(name)
            except PluginError as error:
                raise UsageError(f"{error}; a metric in a file is named FILE.py:NAME") from None
    return metrics


def applicable_metrics(tasks: Iterable[EvaluationTask]) -> list[str]:
    """Return the names of the plug-in metrics that can measure these tasks."""
    columns = {column for task in tasks for column, value in task.fields.items() if value is not None}
    return [name for name, metric in TASK_METRICS.all().items() if not metric.reads or metric.reads in columns]


def compute_metric(name: str, metric: TaskMetric, task: EvaluationTask, played: Playthrough) -> float | None:
    """Compute a metric.

    Raises:
        HeadraceError: the metric failed or returned no finite number; neither is a score of the model.
    """
    try:
        result = metric.compute(task, played)
    except Exception as error:
        raise HeadraceError(f"metric {name} failed on task {task.name!r}: {type(error).__name__}: {error}") from error
    if result is None:
        return None
    try:
        return plain_number(result)
    except (TypeError, ValueError) as error:
        problem = f"metric {name} returned {reprlib.repr(result)} on task {task.name!r}"
        raise HeadraceError(f"{problem}; it must return a finite number: {error}") from None


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Load a function from a Python file.

    Raises:
        UsageError: the file or the function does not exist, or the import fails.
    """
    if not path.is_file():
        raise UsageError(f"{path}:{name}: the file does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function {name}")
    return function  # type: ignore[no-any-return]
