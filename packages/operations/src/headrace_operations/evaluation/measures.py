"""Built-in metrics of tasks. Each documents the task columns that it reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from headrace_operations.evaluation.asking import Playthrough
from headrace_operations.evaluation.task_metrics import TaskMetric
from headrace_operations.evaluation.tasks import EvaluationTask
from headrace_schemas.values.linear_pattern import fits_whole

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_EDGES = " \t\n.!?,;:'\"`*()[]{}$"


def success(task: EvaluationTask, played: Playthrough) -> bool | None:
    """Return whether the last answer equals one of the column `answer`: the same words, or the same last number."""
    accepted_answers = _as_list(task.fields.get("answer"))
    return None if not accepted_answers else any(_matches(played.text, answer) for answer in accepted_answers)


def steps(_task: EvaluationTask, played: Playthrough) -> float:
    """Return the number of model calls."""
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
    return valid and (pattern is None or fits_whole(played.text.strip(), str(pattern)))


def tool(task: EvaluationTask, played: Playthrough) -> float | None:
    """Return the share of the tools in the column `tool` that were called, in the same order.

    If `tool` is an empty list, the result is 1 if no tool was called.
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
    """Return the share of the tools in the column `tool` that were called with their entry of the column `arguments`.

    A tool that was not called counts as a mismatch.
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
    """Return the share of the column `relevant` that the last answer or the field `found` of the play names."""
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
