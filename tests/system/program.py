"""Common frame of all test programs: arguments, random seed, scratch folder, result lines and report."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import processes

if TYPE_CHECKING:
    from headrace_cli.terminal import ProgressDisplay

ROOT = Path(__file__).parents[2]
MODULES = {
    "algorithms": "tests.algorithms.program",
    "architectures": "tests.architectures.program",
    "attack": "tests.attack.program",
    "chaos": "tests.chaos.program",
    "clients": "tests.clients.program",
    "coding-agents": "tests.clients.coding",
    "compose": "tests.compose.program",
    "console": "tests.console.program",
    "feedback": "tests.feedback.program",
    "java-agent": "tests.java_agent.program",
    "jobs": "tests.jobs.program",
    "learning": "tests.learning.program",
    "mutants": "tests.mutants.program",
    "parity": "tests.parity.program",
    "ray": "tests.ray.program",
    "rollouts": "tests.rollouts.program",
    "simulation": "tests.simulation.program",
    "trinity": "tests.trinity.program",
    "upgrade": "tests.upgrade.program",
    "vllm": "tests.vllm.program",
}
"""Name of each program, and the module that defines its `PROGRAM`."""


@dataclass(frozen=True, slots=True)
class Line:
    """One promise of a test program: a measured figure and its limit, both as text. `details` go to the report only."""

    name: str
    figure: str
    limit: str
    holds: bool
    details: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"  {'held' if self.holds else 'BROKEN':6} {self.name}: {self.figure} (limit: {self.limit})"

    def as_json(self) -> dict[str, object]:
        fields = {"name": self.name, "figure": self.figure, "limit": self.limit, "holds": self.holds}
        return {**fields, **self.details}


def at_most(name: str, figure: float, limit: float, unit: str = "") -> Line:
    """Return a line that holds when `figure` is not above `limit`."""
    return Line(name, f"{figure:g}{unit}", f"at most {limit:g}{unit}", figure <= limit, {"value": figure})


def at_least(name: str, figure: float, limit: float, unit: str = "") -> Line:
    """Return a line that holds when `figure` is not below `limit`."""
    return Line(name, f"{figure:g}{unit}", f"at least {limit:g}{unit}", figure >= limit, {"value": figure})


def between(name: str, figure: float, low: float, high: float) -> Line:
    """Return a line that holds when `figure` is at least `low` and at most `high`."""
    return Line(name, f"{figure:.3g}", f"{low:g} to {high:g}", low <= figure <= high, {"value": figure})


def equals(name: str, figure: object, expected: object) -> Line:
    """Return a line that holds when `figure` equals `expected`."""
    return Line(name, str(figure), str(expected), figure == expected)


def none_of(name: str, count: int, total: int) -> Line:
    """Return a line that holds when `count`, the number of violations among `total` cases, is 0 and `total` is not."""
    return Line(name, f"{count} of {total}", "0", count == 0 and total > 0, {"value": count})


def no_problems(name: str, problems: Iterable[str], shown_max: int = 5) -> Line:
    """Return a line that holds when there are no `problems`; the report shows the first `shown_max` of them."""
    listed = list(problems)
    return Line(name, f"{len(listed)} problems", "0", not listed, {"problems": listed[:shown_max]})


def caught(fault: str, *, by_the_suite: bool, details: Mapping[str, object] | None = None) -> Line:
    """Return a line for a fault that was planted on purpose; the line holds when the fault made the suite fail."""
    figure = "caught" if by_the_suite else "not noticed"
    return Line(f"planted fault: {fault}", figure, "caught", by_the_suite, details or {})


class Run:
    """One run of a program. The program adds lines in the order in which it measures them."""

    def __init__(self, name: str, options: argparse.Namespace, seed: int, folder: Path) -> None:
        self.name = name
        self.options = options
        self.seed = seed
        self.folder = folder
        """A scratch folder that is removed after the run."""
        self.draw = random.Random(seed)
        self.lines: list[Line] = []
        self.skipped: list[str] = []
        self.figures: dict[str, Any] = {}
        """Further values of the report after `lines`."""

    def add(self, *lines: Line) -> None:
        """Record `lines` and print them."""
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def add_all(self, lines: Iterable[Line], progress: ProgressDisplay | None = None) -> None:
        """Record lines as an iterator measures them."""
        for line in lines:
            self.add(line)
            if progress is not None:
                progress.advance(activity=f"after: {line.name}")

    def skip(self, part: str, reason: str) -> None:
        """Record that `part` cannot run here. A skipped part is reported and breaks no promise."""
        self.skipped.append(f"{part}: {reason}")
        print(f"  NOT PLAYED {part}: {reason}", flush=True)

    def progress(self, total: float | None, unit: str, *, estimate: bool = True) -> ProgressDisplay:
        """Return the display of this run's progress, to be used in a `with` block."""
        from headrace_cli.terminal import ProgressDisplay

        return ProgressDisplay(self.name, total, unit=unit, estimate=estimate)

    @property
    def held(self) -> bool:
        """Whether there are lines and all of them hold."""
        return bool(self.lines) and all(line.holds for line in self.lines)


def _no_arguments(_: argparse.ArgumentParser) -> None:
    """Add no arguments to those of every program."""


def _nothing_missing() -> str | None:
    return None


@dataclass(frozen=True)
class Program:
    """A test program. `missing` returns the reason why it cannot run on this machine, if there is one."""

    title: str
    play: Callable[[Run], None]
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    missing: Callable[[], str | None] = _nothing_missing


def load(name: str) -> Program:
    """Import the program called `name`."""
    program: Program = importlib.import_module(MODULES[name]).PROGRAM
    return program


def run_program(name: str, arguments: Sequence[str]) -> int:
    """Run a program and write its report.

    Returns:
        The exit status: 0 when every line holds, 1 when one does not or the program ended early, 2 when it cannot
        run on this machine.
    """
    program = load(name)
    options = _parser(name, program).parse_args(arguments)
    if reason := program.missing():
        print(f"{name} cannot run here: {reason}", file=sys.stderr)
        return 2
    processes.start_reaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # through `finally` blocks
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"{name}: SEED={seed}", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"headrace-{name}-", ignore_cleanup_errors=True) as folder:
        run = Run(name, options, seed, Path(folder))
        try:
            program.play(run)
        except Exception as error:  # noqa: BLE001 - the lines measured so far must still be reported
            traceback.print_exc()
            run.add(Line("played to its end", f"{type(error).__name__}: {error}", "yes", holds=False))
    write_report(run, round(time.monotonic() - began_s, 1), options.report)
    return 0 if run.held else 1


def write_report(run: Run, seconds: float, path: Path) -> None:
    """Write the report of `run` as JSON and print its summary."""
    report = {
        "program": run.name,
        "seed": run.seed,
        "held": run.held,
        "seconds": seconds,
        "not_played": run.skipped,
        **run.figures,
        "lines": [line.as_json() for line in run.lines],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    broken = [line.name for line in run.lines if not line.holds]
    print(f"{len(run.lines)} lines in {seconds:g} s, {len(broken)} do not hold ({path})")
    if not run.held:
        print(f"repeat with: python -m tests.system {run.name} --seed {run.seed}", flush=True)


def _parser(name: str, program: Program) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tests.system {name}", description=program.title)
    parser.add_argument("--seed", type=int, help="seed of the run (default: drawn and printed)")
    parser.add_argument(
        "--report", type=Path, default=Path("reports") / f"{name}.json", help="report file (default: %(default)s)"
    )
    program.add_arguments(parser)
    return parser
