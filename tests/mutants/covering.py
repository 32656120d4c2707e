"""Lines of one file that each test runs, which decide the tests that a mutant of a line is tried with first.

A plan is one run of pytest: `record FILE` writes the lines of each test, `only TEST...` runs these tests, `others
TEST...` all but these.

One changed file in front of an installed package, without a change of the checkout, for the imports of tests.

A folder that stands first on PYTHONPATH holds the package as links, and the changed file in the place of its link.
Subprocesses of tests inherit it.
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
    """Return the files of tests that a plan needs, and its plugin of pytest. `changed` is the tested file."""
    kind, *names = plan
    if kind == "record":
        return files, LineRecorder(changed, Path(names[0]))
    if kind == "only":
        files = [file for file in files if any(name.startswith(file) for name in names)]
    return files, Selection(names, others=kind == "others")


class LineRecorder:
    """Plugin of pytest that writes the seconds of each test, and its lines in one file.

    Processes that tests start are not seen, and lines that a fixture of several tests runs count for the first of
    them.
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
        """Follow the frames of the file alone; all others run untraced."""
        if frame.f_code.co_filename != self._file:
            return None
        self._lines.add(frame.f_lineno)
        return self._trace


class CoveringTests:
    """The tests of a file by the lines that they run, the shortest test first."""

    def __init__(self, text: str, recorded: str) -> None:
        """`recorded` is the output of a `LineRecorder`, empty when the recording did not end."""
        self._text = text
        tests: dict[str, tuple[float, list[int]]] = json.loads(recorded or "{}")
        self._lines_of = {test: set(tests[test][1]) for test in sorted(tests, key=lambda test: tests[test][0])}

    def covering(self, text: str) -> list[str]:
        """Return the tests that run a statement that `text` changes."""
        lines = {line for start, end in _changed_statements(self._text, text) for line in range(start, end)}
        return [test for test, run in self._lines_of.items() if run & lines]


class Selection:
    """Plugin of pytest that keeps `tests` alone, in their order, or all tests but these."""

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
    """Yield the lines of each statement that differs: its number, and that of the line behind it."""
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
    """Return the lines of a statement without the statements inside of it."""
    inner = [child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
    return node.lineno, max(min(inner), node.lineno + 1) if inner else (node.end_lineno or node.lineno) + 1


ROOT = Path(__file__).parents[2]


@contextmanager
def overlaid(file: str, text: str) -> Iterator[str]:
    """The folder in which `file` (a path in the repository) reads `text`, for PYTHONPATH."""
    package, inside = split(file)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        target = Path(folder) / package.name
        shutil.copytree(package, target, copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
        changed = target / inside
        changed.unlink()
        changed.write_text(text, encoding="utf-8")
        yield folder


def split(file: str) -> tuple[Path, Path]:
    """Return the import package that `file` belongs to, and its path inside of it."""
    path = ROOT / file
    package = next(parent for parent in reversed(path.parents) if (parent / "__init__.py").exists())
    return package, path.relative_to(package)


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
