"""The file of tasks: JSON lines, each a conversation to answer and what is known about a good answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.jobs.messages import said, tools
from headrace_operations.jobs.rows import BadRow
from headrace_operations.jobs.sources import RowFile
from headrace_schemas import Message, Tool

_ASKED_IN = ("messages", "question", "prompt", "task")
SPLITS = ("gate", "audit")
_NAME_LENGTH_MAX = 200


@dataclass(frozen=True)
class EvaluationTask:
    """One task. `fields` are all its columns: metrics read from them what they need."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    fields: Mapping[str, Any]
    split: str


def read(path: Path) -> tuple[EvaluationTask, ...]:
    """In the order of the file. Raises `UsageError` with the row and what is wrong with it."""
    found: dict[str, EvaluationTask] = {}
    if not path.is_file():
        raise UsageError(f"{path} is no file; name one with the tasks")
    for number, row in RowFile(path).rows():
        try:
            if isinstance(row, BadRow):
                raise row
            task = _task(row)
        except BadRow as error:
            raise UsageError(f"{path}, row {number}: {error}") from None
        if task.name in found:
            raise UsageError(f"{path}, row {number}: another task is called {task.name!r}; give them an id")
        found[task.name] = task
    if not found:
        raise UsageError(f"{path} holds no tasks")
    return tuple(found.values())


def splits(tasks: Sequence[EvaluationTask]) -> dict[str, list[str]]:
    """Names by split, as a gate's program tells them. Raises `UsageError` when one of the two has none."""
    names = {split: [task.name for task in tasks if task.split == split] for split in SPLITS}
    empty = [split for split, members in names.items() if not members]
    if empty:
        raise UsageError(f'no task is of the split {empty[0]}; write more tasks, or "split": "{empty[0]}" into some')
    return names


def _task(row: Mapping[str, Any]) -> EvaluationTask:
    column = next((name for name in _ASKED_IN if row.get(name)), None)
    if column is None:
        raise BadRow("format", f"a task has one of the columns {', '.join(_ASKED_IN)}")
    messages = said(row[column], "user", column)
    if isinstance(system := row.get("system"), str) and system.strip():
        messages = (Message(role="system", content=system), *messages)
    if messages[-1].role == "assistant":
        raise BadRow("order", "the last message is the assistant's, so there is nothing to answer")
    name = str(row.get("id") or row.get("name") or _named(messages))
    split = row.get("split") or _split_of(name)
    if split not in SPLITS:
        raise BadRow("format", f"split is {split!r}; it is one of {', '.join(SPLITS)}")
    return EvaluationTask(name[:_NAME_LENGTH_MAX], messages, tools(row.get("tools")), dict(row), split)


def _named(messages: Sequence[Message]) -> str:
    """The question itself where it is short, so that a refusal says what was asked."""
    text = messages[-1].text.strip()
    if len(messages) == 1 and 0 < len(text) <= _NAME_LENGTH_MAX:
        return text
    plain = json.dumps([one.model_dump(mode="json", exclude_none=True) for one in messages], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _split_of(name: str) -> str:
    """Half of the names each, whatever the order of the file."""
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % 2]
