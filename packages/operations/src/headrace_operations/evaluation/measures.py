"""Metrics of tasks by name: the built-in ones, plug-ins of the group `headrace.task_metrics`, and functions in files.

A metric is a function of a task and its playthrough. It returns a number, a boolean, or None if the task lacks the
column that the metric reads. Tasks with None are counted separately and left out of the mean. Each built-in metric is
pure and documents the task columns that it reads.
"""

from __future__ import annotations

import importlib.util
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace_operations.evaluation.tasks import EvaluationTask, Playthrough
from headrace_runtime.registries import PluginError, Registry
from headrace_schemas.values.linear_pattern import matches_whole_text
from headrace_schemas.values.text import plain_number

Compute = Callable[[EvaluationTask, Playthrough], object]
"""Custom function; its result is validated."""


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """A metric of plays. `reads` is the task column that it requires, or empty if it requires none."""

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
    """Compute a metric of one play, or None if the task lacks the column that the metric reads.

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


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_EDGES = " \t\n.!?,;:'\"`*()[]{}$"


def success(task: EvaluationTask, played: Playthrough) -> bool | None:
    """Return whether the last answer equals an entry of the task's column `answer`: the same words, or the same last
    number.
    """
    accepted_answers = _as_list(task.fields.get("answer"))
    return None if not accepted_answers else any(_matches(played.text, answer) for answer in accepted_answers)


def steps(_task: EvaluationTask, played: Playthrough) -> float:
    """Return the number of model calls that the agent needed for the task."""
    return float(len(played.answers))


def follows_format(task: EvaluationTask, played: Playthrough) -> bool | None:
    """Return whether the last answer matches the column `format`, a regular expression, and all tool calls are valid.

    A call is valid if it names an offered tool and has JSON arguments. The result is None for a task without `format`
    and without tools.
    """
    pattern = task.fields.get("format")
    tool_names = {tool.function.name for tool in task.tools}
    if pattern is None and not tool_names:
        return None
    valid = all(name in tool_names and isinstance(arguments, dict) for name, arguments in played.calls)
    return valid and (pattern is None or matches_whole_text(played.text.strip(), str(pattern)))


def tool(task: EvaluationTask, played: Playthrough) -> float | None:
    """Return the share of the expected tools (column `tool`) that the model called in the expected order, from 0 to 1.

    The result is None for a task without the column.

    An empty list expects that no tool is called: the result is 1 if none was called, else 0.
    """
    if task.fields.get("tool") is None:
        return None
    expected_tools = _as_list(task.fields["tool"])
    called_tools = [name for name, _ in played.calls]
    return (
        _common_subsequence_length(expected_tools, called_tools) / len(expected_tools)
        if expected_tools
        else float(not called_tools)
    )


def arguments(task: EvaluationTask, played: Playthrough) -> float | None:
    """Return the share of the expected tool calls that the model made with the expected arguments, from 0 to 1.

    The result is None for a task without expected calls.

    The columns `tool` and `arguments` list the tools and, in the same order, the arguments of each. A call may have
    more arguments than expected.
    """
    expected = task.fields.get("arguments")
    if expected is None or task.fields.get("tool") is None:
        return None
    expected_tools, values = _as_list(task.fields["tool"]), expected if isinstance(expected, Sequence) else [expected]
    remaining_calls = list(played.calls)
    matching = 0
    for name, value in zip(expected_tools, values, strict=True):
        index = next(
            (n for n, (called, actual) in enumerate(remaining_calls) if called == name and _contains(actual, value)),
            None,
        )
        if index is not None:
            matching += 1
            del remaining_calls[index]
    return matching / len(expected_tools) if expected_tools else None


def recall(task: EvaluationTask, played: Playthrough) -> float | None:
    """Return the share of the entries in column `relevant` that the last answer, or the play's field `found`,
    mentions.
    """
    relevant = _as_list(task.fields.get("relevant"))
    if not relevant:
        return None
    found_names = {str(name) for name in played.fields.get("found", ())}
    return sum(name in found_names or _mentions(played.text, name) for name in relevant) / len(relevant)


SUCCESS = TaskMetric(success, "answer")
STEPS = TaskMetric(steps)
FORMAT = TaskMetric(follows_format)
TOOL = TaskMetric(tool, "tool")
ARGUMENTS = TaskMetric(arguments, "arguments")
RECALL = TaskMetric(recall, "relevant")


def _matches(text: str, expected: str) -> bool:
    if _normalize(text) == _normalize(expected):
        return True
    number = _parse_number(expected)
    numbers = _NUMBER.findall(text)
    return number is not None and bool(numbers) and _parse_number(numbers[-1]) == number


def _parse_number(text: str) -> float | None:
    stripped = text.strip(_EDGES.replace("-", "")).replace(",", "")
    return float(stripped) if _NUMBER.fullmatch(stripped) else None


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split()).strip(_EDGES)


def _mentions(text: str, name: str) -> bool:
    """Return whether `text` contains `name` as a separate word: `m12` does not mention `m1`."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(entry) for entry in value] if isinstance(value, list | tuple) else [str(value)]


def _contains(actual: Any, expected: Any) -> bool:
    if not isinstance(actual, Mapping) or not isinstance(expected, Mapping):
        return bool(actual == expected)
    return all(name in actual and actual[name] == value for name, value in expected.items())


def _common_subsequence_length(expected: Sequence[str], called_names: Sequence[str]) -> int:
    """Return the length of the longest common subsequence of both lists."""
    row = [0] * (len(called_names) + 1)
    for name in expected:
        below = [0]
        for (diagonal, above), called_name in zip(pairwise(row), called_names, strict=True):
            below.append(diagonal + 1 if name == called_name else max(above, below[-1]))
        row = below
    return row[-1]
