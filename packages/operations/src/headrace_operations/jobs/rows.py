"""Row of a data set, independent of the names of its columns."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace_schemas import Message, Tool


class BadRow(HeadraceError):
    """A row that cannot be trained. `kind` is a stable name of the reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row. Each of `answers` continues `prompt`; of two answers the first is the preferred one."""

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()
    untrained: tuple[int, ...] = ()
    """Positions of answers that are context only, counted from the first message of the prompt."""
    label: bool | None = None
    """Whether the answer is good; None if the row has no label."""
    reward: float | None = None

    @property
    def digest(self) -> str:
        """Digest of prompt, answers and tools."""
        return _digest(self.prompt, *self.answers, self.tools)

    @property
    def prompt_digest(self) -> str:
        """Digest of the prompt and tools; a row without a prompt is compared up to its first answer."""
        first = self.answers[0]
        question = first if self.prompt else first[: next((n for n, m in enumerate(first) if m.role == "assistant"), 0)]
        return _digest(self.prompt or question, self.tools)


def _digest(*parts: tuple[Message, ...] | tuple[Tool, ...]) -> str:
    plain = [[entry.model_dump(mode="json", exclude_none=True) for entry in part] for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
