"""What a row of a data set says, whatever its columns are called."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace_schemas import Message, Tool


class BadRow(HeadraceError):
    """A row that cannot be trained. `kind` is a stable word for the reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row. Each of `answers` continues `prompt`; of several the first is preferred to the second."""

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()
    untrained: tuple[int, ...] = ()
    """Places, from the prompt's first message on, of answers that are context only."""
    label: bool | None = None
    """Whether the answer is a good one, where somebody said so."""
    reward: float | None = None

    @property
    def digest(self) -> str:
        """Equal for rows that say the same."""
        return _digest(self.prompt, *self.answers, self.tools)

    @property
    def prompt_digest(self) -> str:
        """Equal for rows that ask the same."""
        first = self.answers[0]
        asked = first if self.prompt else first[: next((n for n, m in enumerate(first) if m.role == "assistant"), 0)]
        return _digest(self.prompt or asked, self.tools)


def _digest(*parts: tuple[Message, ...] | tuple[Tool, ...]) -> str:
    plain = [[one.model_dump(mode="json", exclude_none=True) for one in part] for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
