"""Finds the code fences of a page, so that what the page shows is what the tests run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = {"python", "bash"}
"""Languages that are run. `toml` and `json` are parsed, `text` and `console` are only shown."""
PARSED = {"toml", "json"}
SHOWN = {"text", "console", "mermaid"}


@dataclass(frozen=True)
class Fence:
    """One code block: its language, the words after it, its text and the line it starts on."""

    path: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def label(self) -> str:
        return f"{self.path.name}:{self.line}"


def fences(path: Path) -> list[Fence]:
    """Every fence of the page, in order. A fence without a language is an error: it would never be checked."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *words = match.group(1).split() or [""]
        line = text[: match.start()].count("\n") + 1
        if language not in RUN | PARSED | SHOWN:
            raise ValueError(f"{path.name}:{line}: fence language {language!r} is not one of ours; name one")
        found.append(Fence(path, line, language, tuple(words), match.group(2)))
    return found
