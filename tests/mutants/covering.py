"""Selection of tests for mutants by coverage, and overlays that replace one file of the checkout.

`LineRecorder` records the lines of one file that each test runs. A mutant of a line is tried first with the tests that
run the line. A plan is one run of pytest: `record FILE` writes the lines of each test, `only TEST...` runs these tests,
`others TEST...` all tests but these.

`overlaid` puts a changed file in front of an installed package without a change of the checkout: a folder that stands
first on PYTHONPATH holds links to the package's files, and the changed file. Subprocesses of tests inherit it.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


def planned(plan: Sequence[str], files: Sequence[str], changed: Path) -> tuple[Sequence[str], object]:
    """Return the test files that a plan needs, and its pytest plugin. `changed` is the mutated file."""
    kind, *names = plan
    if kind == "record":
        return files, LineRecorder(changed, Path(names[0]))
    if kind == "only":
        files = [file for file in files if any(name.startswith(file) for name in names)]
    return files, Selection(names, others=kind == "others")


class LineRecorder:
    """Pytest plugin that writes the duration of each test in seconds, and the lines of one file that the test runs.

    Processes that tests start are not recorded, and the lines of a fixture that several tests share are recorded for
    the first of these tests.
    """

    def __init__(self, file: Path, output: Path) -> None:
        self._file = str(file)
        self._output = output
        self._lines: set[int] = set()
        self._tests: dict[str, tuple[float, list[int]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._lines = set()
        began_s = time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self._tests[item.nodeid] = time.monotonic() - began_s, sorted(self._lines)

    def pytest_sessionfinish(self) -> None:
        self._output.write_text(json.dumps(self._tests), encoding="utf-8")

    def _trace(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Trace the frames of the recorded file; code of all other files runs untraced."""
        if frame.f_code.co_filename != self._file:
            return None
        self._lines.add(frame.f_lineno)
        return self._trace


class CoveringTests:
    """Tests of a file by the lines that they run, the fastest test first."""

    def __init__(self, text: str, recorded: str) -> None:
        """Parse the recording. `text` is the file's content; `recorded` is a `LineRecorder`'s output, or empty if it
        failed.
        """
        self._text = text
        tests: dict[str, tuple[float, list[int]]] = json.loads(recorded or "{}")
        self._lines_of = {test: set(tests[test][1]) for test in sorted(tests, key=lambda test: tests[test][0])}

    def covering(self, text: str) -> list[str]:
        """Return the tests that run a statement in which the mutated content `text` differs."""
        lines = {line for start, end in _changed_statements(self._text, text) for line in range(start, end)}
        return [test for test, run in self._lines_of.items() if run & lines]


class Selection:
    """Pytest plugin that runs only `tests`, in their order, or all tests but these."""

    def __init__(self, tests: Sequence[str], *, others: bool) -> None:
        self._order = {test: position for position, test in enumerate(tests)}
        self._others = others

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._others:
            items[:] = [item for item in items if item.nodeid not in self._order]
        else:
            selected = [item for item in items if item.nodeid in self._order]
            items[:] = sorted(selected, key=lambda item: self._order[item.nodeid])


def _changed_statements(old: str, new: str) -> Iterator[tuple[int, int]]:
    """Yield the first line and the line after the end of each statement that differs."""
    before, after = old.splitlines(), new.splitlines()
    first = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
    if first is None:
        return
    same_at_end = 0
    while same_at_end < min(len(before), len(after)) - first and before[-1 - same_at_end] == after[-1 - same_at_end]:
        same_at_end += 1
    start, end = first + 1, max(len(before) - same_at_end + 1, first + 2)
    for node in ast.walk(ast.parse(old)):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            from_line, to_line = _own_lines(node)
            if from_line < end and start < to_line:
                yield from_line, to_line


def _own_lines(node: ast.stmt | ast.ExceptHandler) -> tuple[int, int]:
    """Return the first line and the line after the end of a statement without its nested statements."""
    inner = [child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
    return node.lineno, max(min(inner), node.lineno + 1) if inner else (node.end_lineno or node.lineno) + 1


ROOT = Path(__file__).parents[2]


@contextmanager
def overlaid(file: str, text: str) -> Iterator[str]:
    """Yield a folder for PYTHONPATH in which `file`, a path in the repository, has the content `text`."""
    package, inside = split(file)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        target = Path(folder) / package.name
        shutil.copytree(package, target, copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
        changed = target / inside
        changed.unlink()
        changed.write_text(text, encoding="utf-8")
        yield folder


def split(file: str) -> tuple[Path, Path]:
    """Return the folder of the import package that contains `file`, and the path of `file` within this folder."""
    path = ROOT / file
    package = next(parent for parent in reversed(path.parents) if (parent / "__init__.py").exists())
    return package, path.relative_to(package)


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
