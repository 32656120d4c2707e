"""Metrics by name: whatever an installed package announces under `headrace.task_metrics`, and functions in files.

A metric is a plain function of a task and what came of playing it. It returns a number, or true or false, or None where
the task says nothing that it could measure. None is left out of the mean and counted; it is no zero.
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
from headrace_schemas.plain_values import plain_number

Compute = Callable[[EvaluationTask, Playthrough], object]
"""A function of anybody: what it returns is looked at."""


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """One of them. `reads`: the column of a task without which it measures nothing; empty: none is needed."""

    compute: Compute
    reads: str = ""


TASK_METRICS: Registry[TaskMetric] = Registry("task_metrics", TaskMetric, "metric")


def chosen(names: Iterable[str]) -> dict[str, TaskMetric]:
    """Announced names, and `FILE.py:NAME`. Raises `UsageError`."""
    found = {}
    for name in names:
        path, sign, function = name.rpartition(":")
        if sign and path.endswith(".py"):
            found[function] = TaskMetric(loaded(Path(path), function))
        else:
            try:
                found[name] = TASK_METRICS.get(name)
            except PluginError as error:
                raise UsageError(f"{error}; one of yours is named FILE.py:NAME") from None
    return found


def fitting(tasks: Iterable[EvaluationTask]) -> list[str]:
    """Announced metrics that measure something of these tasks."""
    columns = {column for task in tasks for column, value in task.fields.items() if value is not None}
    return [name for name, metric in TASK_METRICS.all().items() if not metric.reads or metric.reads in columns]


def value_of(name: str, metric: TaskMetric, task: EvaluationTask, played: Playthrough) -> float | None:
    """Raises `HeadraceError` when the metric fails or returns what is no number: that is no score of the model."""
    try:
        found = metric.compute(task, played)
    except Exception as error:
        raise HeadraceError(
            f"the metric {name} failed on task {task.name!r}: {type(error).__name__}: {error}"
        ) from error
    if found is None:
        return None
    try:
        return plain_number(found)
    except (TypeError, ValueError) as error:
        wrong = f"the metric {name} returned {reprlib.repr(found)} on task {task.name!r}"
        raise HeadraceError(f"{wrong}; a finite number is wanted: {error}") from None


def loaded(path: Path, name: str) -> Callable[..., Any]:
    """A function of a file. Raises `UsageError`."""
    if not path.is_file():
        raise UsageError(f"{path}:{name}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"{path} has no function {name}")
    return found  # type: ignore[no-any-return]
