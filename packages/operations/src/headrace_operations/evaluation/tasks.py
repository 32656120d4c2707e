"""Task files: JSON lines, each with a conversation to answer and with columns for the metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.jobs.messages import parse_messages, parse_tools
from headrace_operations.jobs.sources import BadRow, RowFile
from headrace_schemas import Message, Tool

_PROMPT_COLUMNS = ("messages", "question", "prompt", "task")
SPLITS = ("gate", "audit")
_NAME_LENGTH_MAX = 200


@dataclass(frozen=True)
class EvaluationTask:
    """One task. `fields` has all columns of its row, for the metrics."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    fields: Mapping[str, Any]
    split: str


def read(path: Path) -> tuple[EvaluationTask, ...]:
    """Read the tasks in the order of the file.

    Raises:
        UsageError: a row is invalid, two tasks have the same name, or the file has no tasks.
    """
    tasks: dict[str, EvaluationTask] = {}
    if not path.is_file():
        raise UsageError(f"{path}: is not a file; name a file of tasks")
    for number, row in RowFile(path).rows():
        try:
            if isinstance(row, BadRow):
                raise row
            task = _task(row)
        except BadRow as error:
            raise UsageError(f"{path}, row {number}: {error}") from None
        if task.name in tasks:
            raise UsageError(f"{path}, row {number}: the name {task.name!r} is used twice; add the column id")
        tasks[task.name] = task
    if not tasks:
        raise UsageError(f"{path}: has no tasks")
    return tuple(tasks.values())


def splits(tasks: Sequence[EvaluationTask]) -> dict[str, list[str]]:
    """Return the names of the tasks by split, in the form that a gate program sends.

    Raises:
        UsageError: a split has no task.
    """
    names = {split: [task.name for task in tasks if task.split == split] for split in SPLITS}
    empty = [split for split, members in names.items() if not members]
    if empty:
        raise UsageError(f'split {empty[0]!r} has no task; add tasks, or write "split": "{empty[0]}" into some rows')
    return names


def _task(row: Mapping[str, Any]) -> EvaluationTask:
    column = next((name for name in _PROMPT_COLUMNS if row.get(name)), None)
    if column is None:
        raise BadRow("format", f"a task must have one of the columns {', '.join(_PROMPT_COLUMNS)}")
    messages = parse_messages(row[column], "user", column)
    if isinstance(system := row.get("system"), str) and system.strip():
        messages = (Message(role="system", content=system), *messages)
    if messages[-1].role == "assistant":
        raise BadRow("order", "the last message is from the assistant; it must be from the user or a tool")
    name = str(row.get("id") or row.get("name") or _default_name(messages))
    split = row.get("split") or _default_split(name)
    if split not in SPLITS:
        raise BadRow("format", f"split = {split!r}: must be one of {', '.join(SPLITS)}")
    return EvaluationTask(name[:_NAME_LENGTH_MAX], messages, parse_tools(row.get("tools")), dict(row), split)


def _default_name(messages: Sequence[Message]) -> str:
    """Return the question itself if it is short, so that messages can show it, otherwise a digest."""
    text = messages[-1].text.strip()
    if len(messages) == 1 and 0 < len(text) <= _NAME_LENGTH_MAX:
        return text
    plain = json.dumps([message.model_dump(mode="json", exclude_none=True) for message in messages], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _default_split(name: str) -> str:
    """Return a split by the digest of the name: half of the names each, independent of the order of the file."""
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % 2]
