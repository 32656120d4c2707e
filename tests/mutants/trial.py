"""One mutant against the tests that should notice it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.mutants.overlay import ROOT, overlaid

Outcome = Literal["killed", "survived", "timeout", "not run"]
"""A mutant that never ends is noticed, too; `not run` is a fault of the trial: the tests could not be started."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of the repository, the text that it gets, and the tests that it is tried with."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant, and the last lines that pytest said."""

    outcome: Outcome
    seconds: float
    said: str

    @property
    def killed(self) -> bool:
        return self.outcome in ("killed", "timeout")


def tried(mutant: Mutant, timeout_s: float) -> Verdict:
    """Run the tests until the first one fails."""
    began = time.monotonic()
    with overlaid(mutant.file, mutant.text) as environ:
        status, said = _pytest(mutant.tests, environ, timeout_s)
    return Verdict(_OUTCOMES.get(status, "not run"), round(time.monotonic() - began, 1), said)


_OUTCOMES: dict[int | None, Outcome] = {0: "survived", 1: "killed", 2: "killed", None: "timeout"}
"""By pytest's exit status; 2 is a module that no longer imports."""


def _pytest(tests: Sequence[str], environ: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-m",
        "not postgres",
        *tests,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with whatever the tests have started
        process.communicate()
        return None, f"no end after {timeout_s:g} s"
    return process.returncode, "\n".join(said.strip().splitlines()[-6:])
