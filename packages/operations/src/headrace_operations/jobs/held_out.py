"""Tasks that training must not see: those of the gate, and those of files. Who trains on them measures memory."""

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
from headrace_operations.jobs.rows import BadRow, DataRow
from headrace_operations.jobs.sources import RowFile
from headrace_runtime.parent_death import bound_to_parent
from headrace_schemas.gate import Tasks

SHINGLE_WORDS = 13
"""So many words in a row are no coincidence (arXiv:2005.14165, appendix C)."""
_WORDS_MIN = 4
"""Shorter tasks are found only where a message says just that."""
_WORD = re.compile(r"\w+")
_NAMED_IN = ("task", "question", "prompt", "instruction", "input", "messages")
_GATE_S_MAX = 60.0


class HeldOut:
    """Texts of tasks, by name. A row leaks when a user's message is one of them, or has a long stretch of one."""

    def __init__(self, tasks: Mapping[str, str]) -> None:
        self._whole: dict[tuple[str, ...], str] = {}
        self._parts: dict[tuple[str, ...], str] = {}
        for name, text in tasks.items():
            words = _words(text)
            if words:
                self._whole.setdefault(words, name)
                length = min(len(words), SHINGLE_WORDS)
                if length >= _WORDS_MIN:
                    self._parts |= {part: name for part in _stretches(words, length) if part not in self._parts}
        self._lengths = sorted({len(part) for part in self._parts})

    def __len__(self) -> int:
        return len(self._whole)

    def check(self, row: DataRow) -> None:
        """Raises `BadRow`."""
        first = [*row.prompt, *row.answers[0]]
        for message in (one for one in first if one.role == "user"):
            name = self._found(_words(message.text))
            if name is not None:
                raise BadRow("held_out", f"it asks what the held-out task {_short(name)} asks")

    def _found(self, words: tuple[str, ...]) -> str | None:
        if words in self._whole:
            return self._whole[words]
        stretches = (part for length in self._lengths for part in _stretches(words, length))
        return next((self._parts[part] for part in stretches if part in self._parts), None)


def tasks_of_files(paths: Iterable[Path]) -> dict[str, str]:
    """The tasks of files of rows: what the user asks. Raises `UsageError` where none has such a column."""
    found: dict[str, str] = {}
    for path in paths:
        for number, row in RowFile(path).rows():
            if isinstance(row, BadRow):
                raise UsageError(f"{path}, row {number}: {row}")
            texts = list(_texts(row))
            if not texts:
                raise UsageError(f"{path}, row {number}: a task has one of the columns {', '.join(_NAMED_IN)}")
            found |= {f"{path.name}:{number}": text for text in texts}
    return found


def tasks_of_gate(command: Iterable[str], base_url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the names of all tasks of the gate's program, which it prints before it is asked. `environ` is the
    program's. Raises `UsageError`."""
    filled = [one.replace("{base_url}", base_url).replace("{python}", sys.executable) for one in command]
    try:
        done = subprocess.run(
            bound_to_parent(filled), stdin=subprocess.DEVNULL, capture_output=True, env=dict(environ),
            timeout=_GATE_S_MAX, check=False,
        )  # fmt: skip
        tasks = Tasks.model_validate_json(done.stdout.split(b"\n", 1)[0])
    except (OSError, subprocess.TimeoutExpired, ValidationError) as error:
        what = f"no tasks within {_GATE_S_MAX:g} s" if isinstance(error, subprocess.TimeoutExpired) else "no tasks"
        raise UsageError(
            f"registry.gate.command = {filled}: the gate's program names {what}, so leakage cannot be looked for; "
            "mend it (headrace config check), or leave it out with --no-gate-tasks"
        ) from None
    return {name: name for name in (*tasks.gate, *tasks.audit)}


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    value = next((row[name] for name in _NAMED_IN if row.get(name)), None)
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (str(one.get("content")) for one in value if isinstance(one, dict) and one.get("role") == "user")


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


def _stretches(words: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (words[at : at + length] for at in range(len(words) - length + 1))


def _short(name: str) -> str:
    return json.dumps(name if len(name) <= 60 else f"{name[:60]}…", ensure_ascii=False)
