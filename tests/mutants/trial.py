"""Trials of mutants against their tests, and a cache of the verdicts, so that a stopped run can be continued."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from tests.mutants.covering import ROOT, CoveringTests, overlaid

Outcome = Literal["killed", "survived", "timeout", "not run"]
"""Result of a trial. `timeout` counts as detected; `not run` means that the tests could not be started."""

_LIMIT_S_MIN = 30.0
_SLOWER_MAX = 10.0
"""Time limit of a trial, as a multiple of the duration with the unchanged file."""
Target = tuple[str, tuple[str, ...]]
"""A file and its tests: mutants with equal targets share a server."""


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
