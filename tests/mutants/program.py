"""Mutation tests: mutants of the core modules, with one changed line each, that the unit tests have to detect.

`modules.toml` lists the modules with their tests, `survivors.toml` the mutants that may survive, and `planted.toml`
faults that were written by hand. Planted faults come first, then cosmic-ray's mutants, two at a time; verdicts of
earlier runs are cached. A line fails when less than 95 % of the mutants were killed, a planted fault or an unlisted
mutant survives, a listed survivor is stale, or mutants remain untried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue

from pydantic import BaseModel, ConfigDict

from headrace_cli.terminal import ProgressDisplay
from tests.mutants.trial import ROOT, Mutant, Target, Verdict, VerdictCache, served
from tests.system.program import Program, Run, at_least, at_most, no_problems

HERE = Path(__file__).parent
GENERATOR = ROOT / ".venv-mutants" / "bin" / "python"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Group(_Strict):
    """Modules of a package whose mutants are tried with the same tests."""

    package: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        return [f"{self.package}/{module}" for module in self.modules]


class Survivor(_Strict):
    """A mutant that may survive, and the reason."""

    file: str
    original: str
    mutated: str
    reason: str


class _Groups(_Strict):
    group: tuple[Group, ...]


class _Survivors(_Strict):
    survivor: tuple[Survivor, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One line that a mutant changes, without the content of the whole file."""

    file: str
    line: int
    operator: str
    original: str
    mutated: str

    @property
    def lines(self) -> tuple[str, str, str]:
        """Key of a mutant in the list of survivors.

        The line number is left out, because it changes with other edits.
        """
        return self.file, self.original, self.mutated


def groups() -> tuple[Group, ...]:
    return _Groups.model_validate(_toml("modules.toml")).group


def survivors() -> tuple[Survivor, ...]:
    return _Survivors.model_validate(_toml("survivors.toml")).survivor


def written(chosen: Sequence[Group]) -> list[tuple[Change, Mutant]]:
    """Return every mutant of the modules of `chosen`, as cosmic-ray generates them."""
    if not GENERATOR.exists():
        raise SystemExit(f"{GENERATOR} is not there; `make check NAME=mutants` makes it")
    tests = {file: group.tests for group in chosen for file in group.files}
    command = [GENERATOR, HERE / "generate.py"]
    process = subprocess.run(command, input="\n".join(tests), text=True, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    pairs = []
    for entry in map(json.loads, process.stdout.splitlines()):
        text = entry.pop("text")
        change = Change(**entry)
        name = f"{change.file}:{change.line}: {change.original} -> {change.mutated}"
        pairs.append((change, Mutant(name, change.file, text, tests[change.file])))
    return pairs


def _toml(name: str) -> dict[str, object]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


TABLE = Path(__file__).with_name("planted.toml")


class Planted(BaseModel):
    """One fault that was written by hand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]

    @property
    def stale(self) -> str | None:
        """Reason why the fault can no longer be planted, or None."""
        path = ROOT / self.file
        if not path.exists():
            return f"{self.name}: {self.file} is not there; name the file where it is now"
        count = path.read_text(encoding="utf-8").count(self.original)
        if count != 1:
            return f"{self.name}: {self.original!r} stands {count} times in {self.file}, and once is needed"
        missing = [test for test in self.tests if not (ROOT / test).exists()]
        return f"{self.name}: {missing[0]} is not there" if missing else None

    def mutant(self) -> Mutant:
        text = (ROOT / self.file).read_text(encoding="utf-8").replace(self.original, self.mutated)
        return Mutant(f"planted: {self.name}", self.file, text, self.tests)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    planted: tuple[Planted, ...]


def planted() -> tuple[Planted, ...]:
    return _Table.model_validate(tomllib.loads(TABLE.read_text(encoding="utf-8"))).planted


SHARE_MIN = 0.95


@dataclass
class Trials:
    """Verdicts of the tried mutants, and the number of untried ones."""

    verdicts: dict[Mutant, Verdict] = field(default_factory=dict)
    untried: int = 0

    def lived(self) -> list[Mutant]:
        return [mutant for mutant, verdict in self.verdicts.items() if verdict.outcome == "survived"]

    def not_run(self) -> list[Mutant]:
        return [mutant for mutant, verdict in self.verdicts.items() if verdict.outcome == "not run"]


def play(run: Run) -> None:
    arguments = run.options
    listed = {(item.file, item.original, item.mutated) for item in survivors()}
    faults = planted()
    stale = [problem for fault in faults if (problem := fault.stale)]
    by_hand = [fault.mutant() for fault in faults if not fault.stale]
    chosen = _named(groups(), arguments.only)
    changes = {mutant: change for change, mutant in ([] if arguments.planted else written(chosen))}
    mutants = [*by_hand, *changes] if not arguments.only else [*changes]
    if arguments.again:
        lived = json.loads(arguments.again.read_text(encoding="utf-8"))["survived"]
        mutants = [mutant for mutant in mutants if mutant.name in lived]
    if arguments.sample:
        indexes = run.draw.sample(range(len(mutants)), min(arguments.sample, len(mutants)))
        mutants = [mutants[index] for index in sorted(indexes)]  # those of one file share a server
    cache = VerdictCache(arguments.memory)
    trials = try_all(mutants, cache, arguments)
    if not (arguments.sample or arguments.only or arguments.planted or arguments.again):
        existing = {change.lines for change in changes.values()}
        stale += [f"no mutant turns {item[1]!r} into {item[2]!r} in {item[0]}" for item in sorted(listed - existing)]
    _report(run, trials, changes, listed, stale)


def try_all(mutants: Sequence[Mutant], cache: VerdictCache, arguments: argparse.Namespace) -> Trials:
    """Try the mutants until `--minutes` have passed; later ones stay untried."""
    trials = Trials({mutant: verdict_before for mutant in mutants if (verdict_before := cache.get(mutant))})
    left = Waiting(mutant for mutant in mutants if mutant not in trials.verdicts)
    print(f"mutants: {len(mutants)}, of which {len(trials.verdicts)} are known from before", flush=True)
    ends = time.monotonic() + 60 * arguments.minutes
    results: Queue[tuple[Mutant, Verdict]] = Queue()

    def work() -> None:
        """Try the waiting mutants one file after the other until the time is over."""
        while time.monotonic() < ends and (first := left.take()):
            with served(first, arguments.timeout_s) as server:
                mutant: Mutant | None = first
                while mutant:
                    results.put((mutant, server.try_mutant(mutant)))
                    mutant = left.take(server.target) if time.monotonic() < ends else None

    with (
        ProgressDisplay("mutants", len(left), unit="mutants") as progress,
        ThreadPoolExecutor(arguments.processes) as pool,  # each thread waits for a process of its own
    ):
        workers = [pool.submit(work) for _ in range(arguments.processes)]
        while not (results.empty() and all(worker.done() for worker in workers)):
            with contextlib.suppress(Empty):
                mutant, verdict = results.get(timeout=1.0)
                trials.verdicts[mutant] = verdict
                if verdict.outcome != "not run":
                    cache.put(mutant, verdict)
                _tell(progress, mutant, verdict, len(trials.lived()))
        for worker in workers:
            worker.result()
    trials.untried = len(left)
    return trials


class Waiting:
    """Queue of untried mutants, shared by several workers."""

    def __init__(self, mutants: Iterable[Mutant]) -> None:
        self._left = deque(mutants)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, target: Target | None = None) -> Mutant | None:
        """Remove and return the next mutant, or return None if there is none or, with `target`, its target differs."""
        with self._lock:
            if not self._left or target not in (None, self._left[0].target):
                return None
            return self._left.popleft()


def _tell(progress: ProgressDisplay, mutant: Mutant, verdict: Verdict, lived: int) -> None:
    """Update the progress display, and print a surviving mutant at once."""
    progress.advance(activity=f"{lived} live")
    if not verdict.killed:
        progress.print_line(f"{verdict.outcome}: {mutant.name}")
        if verdict.outcome == "not run":
            progress.print_line(verdict.output)


def _report(
    run: Run, trials: Trials, changes: dict[Mutant, Change], listed: set[tuple[str, str, str]], stale: list[str]
) -> None:
    """Add the result lines: killed share, surviving planted faults, stale entries, mutants without a result."""
    lived = trials.lived()
    excused = [mutant for mutant in lived if mutant in changes and changes[mutant].lines in listed]
    unexcused = [mutant for mutant in lived if mutant not in excused]
    killed_lines = {changes[m].lines for m, verdict in trials.verdicts.items() if verdict.killed and m in changes}
    lived_lines = {changes[mutant].lines for mutant in lived if mutant in changes}
    killed = sorted(listed & killed_lines - lived_lines)
    stale += [f"a test kills {original!r} -> {mutated!r} in {file}" for file, original, mutated in killed]
    survived = sorted(mutant.name for mutant in unexcused)
    counted = len(trials.verdicts) - len(excused) - len(trials.not_run())
    share = 1 - len(unexcused) / counted if counted else 0.0
    print(*(f"survived: {name}" for name in survived), sep="\n")
    run.add(
        at_least(f"killed share of {counted} mutants", round(share, 4), SHARE_MIN),
        no_problems("planted faults that live", [mutant.name for mutant in unexcused if mutant not in changes]),
        no_problems("stale entries of the lists", sorted(stale)),
        no_problems("mutants without a result", sorted(mutant.name for mutant in trials.not_run())),
        at_most("untried mutants", trials.untried, 0),
    )
    run.figures |= {
        "killed_share": round(share, 4),
        "tried": len(trials.verdicts),
        "untried": trials.untried,
        "excused": len(excused),
        "survived": survived,
        "stale": sorted(stale),
    }


def _named(groups: Sequence[Group], only: str) -> list[Group]:
    """Return the groups with modules whose path contains `only`, reduced to these modules."""
    selected = []
    for group in groups:
        modules = tuple(module for module in group.modules if only in f"{group.package}/{module}")
        if modules:
            selected.append(group.model_copy(update={"modules": modules}))
    if not selected:
        raise SystemExit(f"no core module's path contains {only!r}; tests/mutants/modules.toml lists them")
    return selected


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="part of the paths of the modules to change")
    parser.add_argument(
        "--planted", action="store_true", help="try the faults that were planted by hand, and no others"
    )
    parser.add_argument("--again", type=Path, help="try the survivors of this report")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants to draw (default: all)")
    parser.add_argument("--processes", type=int, default=2, help="mutants tried at a time (default: %(default)s)")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="limit for unchanged code; a mutant has ten times its time"
    )
    parser.add_argument("--minutes", type=float, default=240.0, help="start no mutant later (default: %(default)s)")
    parser.add_argument("--memory", type=Path, default=Path("reports/mutants-tried.jsonl"), help="former results")


PROGRAM = Program("Change the core modules one line at a time; the unit tests have to notice.", play, _add_arguments)
