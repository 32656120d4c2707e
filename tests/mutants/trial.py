"""Trials of mutants against the tests that cover them, on overlays of the checkout, with a cache of the verdicts.

`LineRecorder` records the lines of one file that each test runs. A mutant of a line is tried first with the tests that
run the line. A plan is one run of pytest: `record FILE` writes the lines of each test, `only TEST...` runs these tests,
`others TEST...` all tests but these.

`overlaid` puts a changed file in front of an installed package without a change of the checkout: a folder that stands
first on PYTHONPATH holds links to the package's files, and the changed file. Subprocesses of tests inherit it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

Outcome = Literal["killed", "survived", "timeout", "not run"]
"""Result of a trial. `timeout` counts as detected; `not run` means that the tests could not be started."""

_LIMIT_S_MIN = 30.0
_SLOWER_MAX = 10.0
"""Time limit of a trial, as a multiple of the duration with the unchanged file."""
Target = tuple[str, tuple[str, ...]]
"""A file and its tests: mutants with equal targets share a server."""


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


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mutant: a file of the repository, its changed content, and the tests to try it with."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]

    @property
    def target(self) -> Target:
        return self.file, self.tests


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a mutant's trial, with the last lines of pytest's output."""

    outcome: Outcome
    seconds: float
    output: str
    by: str = ""
    """File of the test that killed the mutant, if pytest names it."""

    @property
    def killed(self) -> bool:
        return self.outcome in ("killed", "timeout")


_OUTCOMES: dict[int | None, Outcome] = {
    0: "survived", 1: "killed", 2: "killed", 4: "killed", 5: "survived", None: "timeout",
}  # fmt: skip
"""Verdict by pytest's exit status. Status 2 means a test and 4 a conftest that cannot be imported any more; the control
has shown that unchanged code can. Status 5 means that no test was left to run.
"""


class Server:
    """Process that has imported the unchanged modules of one file and runs one trial at a time.

    The caller must `close` it. The first trial is that of the unchanged file, whose verdict is `control`. A mutant is
    tried with the tests that run the changed statement, and if it survives these, with all other tests.
    """

    def __init__(self, file: str, tests: tuple[str, ...], timeout_s: float) -> None:
        self.target = (file, tests)
        command = [sys.executable, "-m", "tests.mutants.server", file, *tests]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        text = (ROOT / file).read_text(encoding="utf-8")
        with tempfile.NamedTemporaryFile("r", suffix=".json") as recorded:
            self.control = self._play(text, timeout_s, ["record", recorded.name])
            self._tests = CoveringTests(text, recorded.read())
        self._limit_s = max(_LIMIT_S_MIN, _SLOWER_MAX * self.control.seconds)

    def try_mutant(self, mutant: Mutant) -> Verdict:
        """Run the tests on a mutant until the first one fails."""
        assert mutant.target == self.target
        if self.control.outcome != "survived":
            return Verdict("not run", 0.0, f"the tests fail without any mutant: {self.control.output}")
        covering = self._tests.covering(mutant.text)
        verdict = self._play(mutant.text, self._limit_s, ["only", *covering]) if covering else None
        if verdict and verdict.outcome != "survived":
            return verdict
        other_outcome = self._play(mutant.text, self._limit_s, ["others", *covering])
        return replace(other_outcome, seconds=round(other_outcome.seconds + (verdict.seconds if verdict else 0), 1))

    def _play(self, text: str, timeout_s: float, plan: list[str]) -> Verdict:
        began = time.monotonic()
        with overlaid(self.target[0], text) as folder, tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            status = self._ask([folder, log.name, timeout_s, plan])
            output = "\n".join(log.read().strip().splitlines()[-6:])
        killer = re.search(r"^(?:FAILED|ERROR) ([^:\s]+)", output, re.MULTILINE)
        by = killer[1] if killer and status == 1 else ""
        return Verdict(_OUTCOMES.get(status, "not run"), round(time.monotonic() - began, 1), output, by)

    def _ask(self, trial: list[object]) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(trial) + "\n")
            self._process.stdin.flush()
            status: int | None = json.loads(self._process.stdout.readline() or "-1")
        except BrokenPipeError:
            return -1
        return status

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def served(mutant: Mutant, timeout_s: float) -> Iterator[Server]:
    """Yield a server for mutants of the same target. `timeout_s` bounds the trial of the unchanged file."""
    server = Server(*mutant.target, timeout_s)
    try:
        yield server
    finally:
        server.close()


def try_mutant(mutant: Mutant, timeout_s: float) -> Verdict:
    """Try one mutant alone."""
    with served(mutant, timeout_s) as server:
        return server.try_mutant(mutant)


class VerdictCache:
    """Cache of earlier verdicts in a file with one line each.

    The verdict of a killed mutant is valid while the mutant and the file of the killing test are unchanged. Any other
    verdict is valid while all of its tests are unchanged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._verdicts: dict[str, dict[str, tuple[Verdict, list[str]]]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            entry = json.loads(line)
            self._remember(entry.pop("mutant"), entry.pop("digest"), entry.pop("tests"), Verdict(**entry))

    def get(self, mutant: Mutant) -> Verdict | None:
        for digest, (verdict, tests) in self._verdicts.get(_name(mutant), {}).items():
            if {*tests} <= {*mutant.tests} and digest == _digest(tests) and (verdict.by or tests == [*mutant.tests]):
                return verdict
        return None

    def put(self, mutant: Mutant, verdict: Verdict) -> None:
        tests = [verdict.by] if verdict.by in mutant.tests else [*mutant.tests]
        digest = _digest(tests)
        self._remember(_name(mutant), digest, tests, verdict)
        line = {"mutant": _name(mutant), "digest": digest, "tests": tests, **asdict(verdict)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _remember(self, name: str, digest: str, tests: list[str], verdict: Verdict) -> None:
        self._verdicts.setdefault(name, {})[digest] = verdict, tests


def _name(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.file}\0{mutant.text}".encode()).hexdigest()


def _digest(tests: Sequence[str]) -> str:
    return hashlib.sha256(b"".join(_content(ROOT / test) for test in tests)).hexdigest()


@cache
def _content(path: Path) -> bytes:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path, *sorted(path.parent.glob("conftest.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).digest()
