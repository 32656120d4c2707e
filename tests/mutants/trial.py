"""One mutant against the tests that should notice it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tests.mutants.overlay import ROOT, overlaid

Outcome = Literal["killed", "survived", "timeout", "not run"]
"""A mutant that never ends is noticed, too; `not run` is a fault of the trial: the tests could not be started."""

UNCHANGED = "unchanged "
"""How the names of controls begin."""
Place = tuple[str, tuple[str, ...]]
"""A file, and the tests that its mutants are tried with: what mutants must have in common to be tried by one server."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of the repository, the text that it gets, and the tests that it is tried with."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]

    @property
    def control(self) -> bool:
        """Whether it changes nothing, and so has to survive."""
        return self.name.startswith(UNCHANGED)

    @property
    def place(self) -> Place:
        return self.file, self.tests


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant, and the last lines that pytest said."""

    outcome: Outcome
    seconds: float
    said: str
    by: str = ""
    """The file of the test that killed it, where pytest says so."""

    @property
    def killed(self) -> bool:
        return self.outcome in ("killed", "timeout")


_OUTCOMES: dict[int | None, Outcome] = {0: "survived", 1: "killed", 2: "killed", 4: "killed", None: "timeout"}
"""By pytest's exit status; 2 is a test, and 4 a conftest, that no longer imports. That both are there, unchanged
code has shown."""


class Server:
    """A process that has imported what mutants of one file leave as it is. One trial at a time; `close` it."""

    def __init__(self, mutant: Mutant) -> None:
        self.place = mutant.place
        command = [sys.executable, "-m", "tests.mutants.server", mutant.file, *mutant.tests]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tried(self, mutant: Mutant, timeout_s: float) -> Verdict:
        """Run the tests until the first one fails."""
        assert mutant.place == self.place
        began = time.monotonic()
        with overlaid(mutant.file, mutant.text) as folder, tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            status = self._ask([folder, log.name, timeout_s])
            said = "\n".join(log.read().strip().splitlines()[-6:])
        killer = re.search(r"^(?:FAILED|ERROR) ([^:\s]+)", said, re.MULTILINE)
        by = killer[1] if killer and status == 1 else ""
        return Verdict(_OUTCOMES.get(status, "not run"), round(time.monotonic() - began, 1), said, by)

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
def served(mutant: Mutant) -> Iterator[Server]:
    server = Server(mutant)
    try:
        yield server
    finally:
        server.close()


def tried(mutant: Mutant, timeout_s: float) -> Verdict:
    """One mutant alone."""
    with served(mutant) as server:
        return server.tried(mutant, timeout_s)
