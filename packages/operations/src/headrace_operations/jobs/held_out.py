"""Held-out tasks of the gate and of files. Training must not use them, because it would inflate their scores."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.errors import UsageError
from headrace_operations.jobs.sources import BadRow, DataRow, RowFile
from headrace_runtime.process.parent_death import bound_to_parent
from headrace_schemas.programs.models import Tasks

SHINGLE_WORDS = 13
"""Number of consecutive words that count as a leak (arXiv:2005.14165, appendix C)."""
_WORDS_MIN = 4
"""Shorter tasks leak only through a message that consists of the task alone."""
_WORD = re.compile(r"\w+")
_TASK_COLUMNS = ("task", "question", "prompt", "instruction", "input", "messages")
_GATE_S_MAX = 60.0


class HeldOutTasks:
    """Names of held-out tasks by text. A row leaks a task if a user message equals it or contains a shingle of it."""

    def __init__(self, tasks: Mapping[str, str]) -> None:
        self._texts_by_words: dict[tuple[str, ...], str] = {}
        self._texts_by_shingle: dict[tuple[str, ...], str] = {}
        for name, text in tasks.items():
            words = _words(text)
            if words:
                self._texts_by_words.setdefault(words, name)
                length = min(len(words), SHINGLE_WORDS)
                if length >= _WORDS_MIN:
                    for shingle in _shingles(words, length):
                        self._texts_by_shingle.setdefault(shingle, name)
        self._lengths = sorted({len(shingle) for shingle in self._texts_by_shingle})

    def __len__(self) -> int:
        return len(self._texts_by_words)

    def check(self, row: DataRow) -> None:
        """Check that no user message of the row leaks a task.

        Raises:
            BadRow: a message leaks a task.
        """
        first = [*row.prompt, *row.answers[0]]
        for message in (message for message in first if message.role == "user"):
            name = self._find_task(_words(message.text))
            if name is not None:
                raise BadRow("held_out", f"a user message contains the held-out task {_quote(name)}")

    def _find_task(self, words: tuple[str, ...]) -> str | None:
        if words in self._texts_by_words:
            return self._texts_by_words[words]
        shingles = (shingle for length in self._lengths for shingle in _shingles(words, length))
        return next(
            (self._texts_by_shingle[shingle] for shingle in shingles if shingle in self._texts_by_shingle), None
        )


def read_task_texts(paths: Iterable[Path]) -> dict[str, str]:
    """Return the texts of the tasks in files of rows, which are their user messages.

    Raises:
        UsageError: a row is invalid or has no task column.
    """
    texts_by_name: dict[str, str] = {}
    for path in paths:
        for number, row in RowFile(path).rows():
            if isinstance(row, BadRow):
                raise UsageError(f"{path}, row {number}: {row}")
            texts = list(_texts(row))
            if not texts:
                columns = ", ".join(_TASK_COLUMNS)
                raise UsageError(f"{path}, row {number}: a task must have one of the columns {columns}")
            texts_by_name |= {f"{path.name}:{number}": text for text in texts}
    return texts_by_name


def list_gate_tasks(command: Iterable[str], base_url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Run the gate program until it has printed its tasks, and return their names.

    Args:
        command: `registry.gate.command`.
        base_url: value for the placeholder `{base_url}`.
        environ: environment of the program.

    Raises:
        UsageError: the program prints no tasks.
    """
    arguments = [part.replace("{base_url}", base_url).replace("{python}", sys.executable) for part in command]
    try:
        result = subprocess.run(
            bound_to_parent(arguments), stdin=subprocess.DEVNULL, capture_output=True, env=dict(environ),
            timeout=_GATE_S_MAX, check=False,
        )  # fmt: skip
        tasks = Tasks.model_validate_json(result.stdout.split(b"\n", 1)[0])
    except (OSError, subprocess.TimeoutExpired, ValidationError) as error:
        problem = f"no tasks within {_GATE_S_MAX:g} s" if isinstance(error, subprocess.TimeoutExpired) else "no tasks"
        raise UsageError(
            f"registry.gate.command = {arguments}: the program prints {problem}, so leaks cannot be detected; "
            "fix it (check with `headrace config check`), or skip its tasks with --no-gate-tasks"
        ) from None
    return {name: name for name in (*tasks.gate, *tasks.audit)}


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    value = next((row[name] for name in _TASK_COLUMNS if row.get(name)), None)
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        messages = (entry for entry in value if isinstance(entry, dict))
        yield from (str(message.get("content")) for message in messages if message.get("role") == "user")


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


def _shingles(words: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (words[at : at + length] for at in range(len(words) - length + 1))


def _quote(name: str) -> str:
    return json.dumps(name if len(name) <= 60 else f"{name[:60]}…", ensure_ascii=False)
