"""Code fences of documentation pages, so that tests can run the code that a page shows.

Arguments after the language of a fence state how to run it: `stack` with a running Headrace, `file=NAME` as a file of
this name in the folder of the page's other fences, `tutorial` in order with the page's other tutorial fences (`up` in
the background until the others have ended). Notebooks run with `stack`. Settings in fences are validated by the
services. `NOT_RUN` lists the fences that no test runs, with a reason; a fence may be excluded nowhere else.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from headrace_operations.supervisor.plan import installed
from headrace_runtime.main import Service
from headrace_runtime.settings.sections import ServiceSettings, load

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
    """Code block with its language, run arguments, text and first line. `page` is relative to ROOT."""

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
        """Return the file name if the fence is a file, else None."""
        return next((word.removeprefix("file=") for word in self.how if word.startswith("file=")), None)


def fences(path: Path) -> list[Fence]:
    """Return every fence of a page in order. The code cells of a notebook are one fence, because they share their
    names."""
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
    """Return the reason why `fence` would never be checked, or None if it is checked."""
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
    """Return every page of the repository, including notebooks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", f"*{_NOTEBOOK}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


@cache
def tutorials() -> list[Path]:
    """Return the pages with tutorial fences."""
    return [page for page in pages() if any(fence.is_step for fence in fences(page))]


@cache
def all_fences() -> list[Fence]:
    """Return every fence of every page."""
    return [fence for page in pages() for fence in fences(page)]


_NEEDED = {
    "HEADRACE_TRAINER__BASE": "a-folder",
    "HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://127.0.0.1:1/v1",
    "HEADRACE_JUDGE__ENDPOINT__MODEL": "judge",
}
"""Settings without a default, for pages that show only others."""


def check(text: str, folder: Path) -> None:
    """Check that each service accepts its section in `text`. Raises `SettingError`."""
    path = folder / "shown.toml"
    path.write_text(text, encoding="utf-8")
    services = installed()
    named = [name for name in services if name in tomllib.loads(text)]
    for name in named or ["gateway"]:  # what is common to all, any of them checks
        service: Service[ServiceSettings] = import_module(f"{services[name].module}.__main__").SERVICE
        load(name, service.settings, path, _NEEDED)


_DEMO = "takes minutes; tests/e2e plays the shortened demo"
NOT_RUN = {
    ("README.md", "pip install"): "tests/integration/test_stranger.py installs the built wheels and plays the demo",
    (
        "packages/headrace/README.md",
        "pip install",
    ): "tests/integration/test_stranger.py installs the built wheels and plays the demo",
    ("README.md", "headrace up"): "runs until Ctrl-C; the stack of the other fences is started with exactly this file",
    ("deploy/README.md", "cp .env.example"): "builds images and starts containers; `make check NAME=compose` does that",
    ("examples/email_agent/README.md", "make demo"): _DEMO,
    (
        "examples/math_agent/README.md",
        "make example NAME=math",
    ): "takes up to ten minutes; its parts are tested in tests/unit",
    (
        "examples/werewolf/README.md",
        "make example NAME=werewolf",
    ): "takes up to twelve minutes; its parts are tested in tests/unit",
    (
        "examples/smollm2/README.md",
        "make install",
    ): "needs a package of 93 MB and 20 minutes; tests/unit/smollm2 tests its parts",
    ("examples/werewolf/README.md", "cd examples\nOPENAI_API_KEY"): "needs somebody else's server",
    (
        "examples/werewolf/README.md",
        "cd examples\npython -m werewolf.ablation",
    ): "tests/unit/werewolf plays it; the target holds its lines",
    ("examples/math_agent/README.md", "cd examples"): "needs somebody else's server",
    (
        "examples/email_search/README.md",
        "make example NAME=email",
    ): "takes up to eight minutes; its parts are tested in tests/unit",
    ("examples/email_search/README.md", "cd examples"): "needs somebody else's server",
    ("examples/email_agent/README.md", "cd examples"): "needs somebody else's server",
    ("examples/email_agent/README.md", "export PYTHONPATH"): f"runs until Ctrl-C; what the demo does, and that {_DEMO}",
}
"""Page and beginning of the fence to the reason."""


def key_of(fence: Fence) -> tuple[str, str] | None:
    """Return the `NOT_RUN` entry that excludes the fence, or None if it is run."""
    return next((key for key in NOT_RUN if fence.page == key[0] and fence.text.startswith(key[1])), None)


def executed(*, stack: bool) -> list[Fence]:
    """Return the program fences that run: those with a running Headrace, or the others.

    Fences of a tutorial run in `test_tutorials.py`.
    """
    walked = {str(page.relative_to(ROOT)) for page in tutorials()}
    candidates = [fence for fence in all_fences() if fence.language in RUN and fence.page not in walked]
    return [fence for fence in candidates if fence.needs_stack == stack and not key_of(fence)]
