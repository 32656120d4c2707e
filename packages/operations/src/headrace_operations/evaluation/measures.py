"""The metrics that come with Headrace. Each says which columns of a task it reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from headrace_operations.evaluation.asking import Playthrough
from headrace_operations.evaluation.task_metrics import TaskMetric
from headrace_operations.evaluation.tasks import EvaluationTask
from headrace_schemas.linear_pattern import fits_whole

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_EDGES = " \t\n.!?,;:'\"`*()[]{}$"


def success(task: EvaluationTask, played: Playthrough) -> bool | None:
    """The last answer is one of `answer`: the same words, or, of a number, the same last number."""
    wanted = _listed(task.fields.get("answer"))
    return None if not wanted else any(_answers(played.text, one) for one in wanted)


def steps(_task: EvaluationTask, played: Playthrough) -> float:
    """Calls of the model."""
    return float(len(played.answers))


def format_kept(task: EvaluationTask, played: Playthrough) -> bool | None:
    """The last answer matches `format`, a regular expression, as a whole; and every call names a tool that was offered
    and has JSON arguments. Without either there is no format."""
    pattern = task.fields.get("format")
    offered = {tool.function.name for tool in task.tools}
    if pattern is None and not offered:
        return None
    valid = all(name in offered and isinstance(arguments, dict) for name, arguments in played.calls)
    return valid and (pattern is None or fits_whole(played.text.strip(), str(pattern)))


def tool(task: EvaluationTask, played: Playthrough) -> float | None:
    """The share of the tools in `tool` (one, or several in order) that were called in this order. A task whose `tool`
    is an empty list wants none."""
    if task.fields.get("tool") is None:
        return None
    wanted = _listed(task.fields["tool"])
    called = [name for name, _ in played.calls]
    return _in_order(wanted, called) / len(wanted) if wanted else float(not called)


def arguments(task: EvaluationTask, played: Playthrough) -> float | None:
    """Whether the call of `tool` has each of the `arguments`; of several tools, the share. A tool that was not called
    has none of them."""
    expected = task.fields.get("arguments")
    if expected is None or task.fields.get("tool") is None:
        return None
    wanted, values = _listed(task.fields["tool"]), expected if isinstance(expected, Sequence) else [expected]
    left = list(played.calls)
    right = 0
    for name, value in zip(wanted, values, strict=True):
        place = next((n for n, (called, given) in enumerate(left) if called == name and _has(given, value)), None)
        if place is not None:
            right += 1
            del left[place]
    return right / len(wanted) if wanted else None


def recall(task: EvaluationTask, played: Playthrough) -> float | None:
    """The share of `relevant` that the agent found: named in its last answer, or in the field `found` of the play."""
    relevant = _listed(task.fields.get("relevant"))
    if not relevant:
        return None
    found = {str(one) for one in played.fields.get("found", ())}
    return sum(one in found or _mentions(played.text, one) for one in relevant) / len(relevant)


SUCCESS = TaskMetric(success, "answer")
STEPS = TaskMetric(steps)
FORMAT = TaskMetric(format_kept)
TOOL = TaskMetric(tool, "tool")
ARGUMENTS = TaskMetric(arguments, "arguments")
RECALL = TaskMetric(recall, "relevant")


def _answers(text: str, wanted: str) -> bool:
    if _plain(text) == _plain(wanted):
        return True
    number = _number(wanted)
    numbers = _NUMBER.findall(text)
    return number is not None and bool(numbers) and _number(numbers[-1]) == number


def _number(text: str) -> float | None:
    stripped = text.strip(_EDGES.replace("-", "")).replace(",", "")
    return float(stripped) if _NUMBER.fullmatch(stripped) else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(_EDGES)


def _mentions(text: str, wanted: str) -> bool:
    """As a word of its own: `m1` is not mentioned by `m12`."""
    return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text) is not None


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def _has(given: Any, wanted: Any) -> bool:
    if not isinstance(given, Mapping) or not isinstance(wanted, Mapping):
        return bool(given == wanted)
    return all(name in given and given[name] == value for name, value in wanted.items())


def _in_order(wanted: Sequence[str], called: Sequence[str]) -> int:
    """How many of `wanted` are among `called`, in the same order: the longest common subsequence."""
    row = [0] * (len(called) + 1)
    for one in wanted:
        below = [0]
        for (diagonal, above), other in zip(pairwise(row), called, strict=True):
            below.append(diagonal + 1 if one == other else max(above, below[-1]))
        row = below
    return row[-1]
