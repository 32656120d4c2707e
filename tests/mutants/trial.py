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
Target = tuple[str, tuple[str, ...]]
"""A file and its tests: mutants with equal targets share a server."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of the repository, the text that it gets, and the tests that it is tried with."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]

    @property
    def control(self) -> bool:
        """Whether the mutant changes nothing, and so has to survive."""
        return self.name.startswith(UNCHANGED)

    @property
    def target(self) -> Target:
        return self.file, self.tests


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a mutant, with the last lines of pytest."""

    outcome: Outcome
    seconds: float
    output: str
    by: str = ""
    """File of the killing test, where pytest names it."""

    @property
    def killed(self) -> bool:
        return self.outcome in ("killed", "timeout")


_OUTCOMES: dict[int | None, Outcome] = {0: "survived", 1: "killed", 2: "killed", 4: "killed", None: "timeout"}
"""Verdict by pytest's exit status. Status 2 means a test and 4 a conftest that cannot be imported any more; the control
has shown that unchanged code can.
"""


class Server:
    """Process that has imported the unchanging modules of one file. It plays one trial at a time; the caller must
    `close` it."""

    def __init__(self, mutant: Mutant) -> None:
        self.target = mutant.target
        command = [sys.executable, "-m", "tests.mutants.server", mutant.file, *mutant.tests]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def try_mutant(self, mutant: Mutant, timeout_s: float) -> Verdict:
        """Run the tests until the first one fails."""
        assert mutant.target == self.target
        began = time.monotonic()
        with overlaid(mutant.file, mutant.text) as folder, tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            status = self._ask([folder, log.name, timeout_s])
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
def served(mutant: Mutant) -> Iterator[Server]:
    server = Server(mutant)
    try:
        yield server
    finally:
        server.close()


def try_mutant(mutant: Mutant, timeout_s: float) -> Verdict:
    """One mutant alone."""
    with served(mutant) as server:
        return server.try_mutant(mutant, timeout_s)
