"""Code fences of a page, so that the tests run the code that the page shows.

Arguments after the language of a fence state how to run it: `stack` against a running Headrace, `file=NAME` as a file
of that name in the folder of the page's other fences, `tutorial` one after the other as a reader would, on a page
that is walked from its top to its end (`up` in the background, until the others are done). Notebooks run with `stack`.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = {"python", "bash", "sh"}
PARSED = {"toml", "json", "yaml"}
"""TOML is read as Headrace's settings, too."""
SHOWN = {"text", "console", "mermaid", "diff"}
_FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NOTEBOOK = ".ipynb"
_HOW = re.compile(r"stack|tutorial|up|file=[\w./-]+")


@dataclass(frozen=True)
class Fence:
    """One code block: its language, how it is run, its text and the line it starts on. `page` is relative to ROOT."""

    page: str
    line: int
    language: str
    how: tuple[str, ...]
    text: str

    @property
    def label(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs_stack(self) -> bool:
        return "stack" in self.how

    @property
    def is_step(self) -> bool:
        return "tutorial" in self.how

    @property
    def file(self) -> str | None:
        """Its name, when the fence is a file."""
        return next((word.removeprefix("file=") for word in self.how if word.startswith("file=")), None)


def fences(path: Path) -> list[Fence]:
    """Every fence of the page, in order. The code cells of a notebook are one fence, because they share their names."""
    if path.suffix == _NOTEBOOK:
        return [_cells(path)]
    page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    page_fences = []
    for match in _FENCE.finditer(text):
        language, *how = match.group(1).split() or [""]
        page_fences.append(Fence(page, text[: match.start()].count("\n") + 1, language, tuple(how), match.group(2)))
    return page_fences


def _cells(path: Path) -> Fence:
    cells = json.loads(path.read_bytes())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return Fence(str(path.relative_to(ROOT)), 1, "python", ("stack",), "\n\n".join(code) + "\n")


def problem(fence: Fence) -> str | None:
    """Return the reason why the fence would never be checked; None when it is checked."""
    if fence.language not in RUN | PARSED | SHOWN:
        languages = ", ".join(sorted(RUN | PARSED | SHOWN))
        return f"{fence.label}: fence language {fence.language!r} is none of {languages}; name one"
    wrong = [word for word in fence.how if not _HOW.fullmatch(word)]
    return (
        f"{fence.label}: {wrong[0]!r} says nothing; a fence may have `stack`, `tutorial` or `file=NAME`"
        if wrong
        else None
    )


@cache
def pages() -> list[Path]:
    """Every page of the repository, notebooks among them."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", f"*{_NOTEBOOK}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


@cache
def tutorials() -> list[Path]:
    """The pages that are walked."""
    return [page for page in pages() if any(fence.is_step for fence in fences(page))]


@cache
def all_fences() -> list[Fence]:
    """Every fence of every page."""
    return [fence for page in pages() for fence in fences(page)]
