"""One mutant against the tests that should notice it."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NoReturn

import pytest

from tests.mutants.overlay import ROOT, overlaid

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.mutants.preloaded"])

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
    by: str = ""
    """The file of the test that killed it, where pytest says so."""

    @property
    def killed(self) -> bool:
        return self.outcome in ("killed", "timeout")


def tried(mutant: Mutant, timeout_s: float) -> Verdict:
    """Run the tests until the first one fails."""
    began = time.monotonic()
    with overlaid(mutant.file, mutant.text) as environ:
        status, said = _pytest(mutant.tests, environ, timeout_s)
    killer = re.search(r"^(?:FAILED|ERROR) ([^:\s]+)", said, re.MULTILINE)
    by = killer[1] if killer and status == 1 else ""
    return Verdict(_OUTCOMES.get(status, "not run"), round(time.monotonic() - began, 1), said, by)


_OUTCOMES: dict[int | None, Outcome] = {0: "survived", 1: "killed", 2: "killed", None: "timeout"}
"""By pytest's exit status; 2 is a module that no longer imports."""


def _pytest(tests: Sequence[str], environ: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """A fork of a process that has imported what no mutant changes: that is most of a short trial's time."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", prefix="mutant-", suffix=".log") as log:
        process = _FORKS.Process(target=_run, args=(tests, environ, log.name))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)  # with whatever the tests have started
            process.join()
            return None, f"no end after {timeout_s:g} s"
        return process.exitcode, "\n".join(log.read().strip().splitlines()[-6:])


def _run(tests: Sequence[str], environ: dict[str, str], log: str) -> NoReturn:
    """In the fork: what `PYTHONPATH=... pytest` does, in a group of its own."""
    os.setsid()
    with Path(log).open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.update(environ)
    sys.path[:0] = [environ["PYTHONPATH"], str(ROOT)]
    sys.dont_write_bytecode = True
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not postgres"]
    status = int(pytest.main([*options, *tests]))
    sys.stdout.flush()
    os._exit(status)  # threads that a mutant left behind keep nobody waiting
