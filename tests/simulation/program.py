"""Simulation of every service on a virtual clock, with many seeds on all cores.

There is one checker per promise. Each compares the durable state after a run with the observations from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from headrace_cli.terminal import ProgressDisplay
from tests.simulation.cluster import Cluster, Restless
from tests.simulation.process import Stuck, VirtualLoop, alive, end_others, enter, leave, task_factory
from tests.simulation.promises import serving, training
from tests.simulation.substitutes import installed
from tests.system.program import Program, Run, at_most, none_of

_SPELT_OUT = 5


@dataclass
class Check:
    """Result of a checker. Call `that(condition, text)` for every single condition."""

    promise: str
    count: int = 0
    broken: list[str] = field(default_factory=list)
    """Texts of broken conditions. The first few are stored, the others are only counted."""

    def __call__(self, holds: bool, text: str) -> bool:
        self.count += 1
        if not holds and len(self.broken) < _SPELT_OUT:
            self.broken.append(f"{self.promise}: {text}")
        return holds


PROMISES: Mapping[str, Callable[[Cluster, Check], None]] = {
    function.__name__: function
    for function in (
        serving.p1_captured, serving.p2_tokens, serving.p3_versions, training.p4_once, training.p5_staleness,
        training.p6_abstain, serving.p7_immutable, serving.p8_routing, training.p9_replay, training.p10_late,
        serving.p11_loud, serving.account, serving.order, serving.whole_runs, serving.equal_facts,
    )
}  # fmt: skip
"""Checkers by name."""


def check_all(cluster: Cluster) -> list[Check]:
    """Check every promise on the result of one run."""
    checks = []
    for name, check in PROMISES.items():
        that = Check(name)
        check(cluster, that)
        checks.append(that)
    return checks


_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the simulation of one seed. `broken` is empty when every promise was kept."""

    seed: int
    broken: tuple[str, ...]
    digest: str
    events: int
    virtual_s: float
    wall_s: float
    injected: Mapping[str, int]
    checks: Mapping[str, int]
    story: tuple[str, ...] = field(default=(), repr=False)

    @property
    def command(self) -> str:
        """Command that repeats the run."""
        return f"python -m tests.system simulation --seeds 1 --first {self.seed} --verbose"


def simulate(seed: int, *, verbose: bool = False) -> Outcome:
    """Play a seed and check every promise. Failures of services never raise."""
    began = time.perf_counter()
    folder_root = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headrace-", dir=folder_root) as folder, installed(seed), _litter_lies():
        return _play(Cluster(seed, Path(folder), verbose=verbose), began)


@contextlib.contextmanager
def _litter_lies() -> Iterator[None]:
    """Disable garbage collection during a run.

    Collections depend on all earlier allocations, and finalizers of dead processes' connections would make runs differ.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if enabled:
            gc.enable()


def _play(cluster: Cluster, began: float) -> Outcome:
    loop = VirtualLoop(cluster.thread_delay_s, alive)
    broken: list[str] = []

    def unheard(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if alive():
            broken.append(f"nobody heard: {context.get('message')}: {context.get('exception')!r}")

    loop.set_task_factory(task_factory)
    loop.set_exception_handler(unheard)
    asyncio.set_event_loop(loop)
    enter(cluster)
    try:
        loop.run_until_complete(cluster.play())
    except (Restless, Stuck) as error:
        broken.append(f"liveness: {error}")
    finally:
        virtual_s, events = loop.time(), cluster.trace.counts["append"]
        _end(loop, cluster)
    checks = check_all(cluster)
    leave()
    broken += [text for check in checks for text in check.broken]
    return Outcome(
        seed=cluster.seed,
        broken=tuple(broken),
        digest=cluster.trace.digest(),
        events=events,
        virtual_s=virtual_s,
        wall_s=time.perf_counter() - began,
        injected=dict(cluster.injected),
        checks={check.promise: check.count for check in checks},
        story=tuple(cluster.trace.lines),
    )


def _end(loop: VirtualLoop, cluster: Cluster) -> None:
    loop.set_exception_handler(lambda *_: None)
    loop.more()

    async def kill() -> None:
        cluster.end()
        await end_others()

    loop.run_until_complete(kill())
    loop.run_until_complete(loop.shutdown_asyncgens())
    asyncio.set_event_loop(None)
    loop.close()


_SHOWN_MAX = 10
FIGURES = {"wrong_last_words": "p10_late: wrong last word", "verdicts_on_the_wrong_run": "p10_late: wrong run"}
"""Named figures of the report, with the beginning of the broken promises that count for them."""


def play(run: Run) -> None:
    options = run.options
    began_s = time.perf_counter()
    with _outcomes(options) as outcomes, run.progress(options.seeds, "seeds") as progress:
        played = list(_report_failures(outcomes, progress))
    report = summary(played, options.first, time.perf_counter() - began_s)
    run.figures.update(report)
    for outcome in played if options.verbose else ():
        print("\n".join(outcome.story))
    failed = [outcome for outcome in played if outcome.broken]
    for outcome in failed[:_SHOWN_MAX]:
        print(f"seed {outcome.seed} broke a promise; again: {outcome.command}")
        print("".join(f"    {text}\n" for text in outcome.broken), end="")
    faults, checks = (sum(outcome_counts.values()) for outcome_counts in _totals(played))
    run.add(none_of(f"seeds that broke a promise ({faults} faults, {checks} checks)", len(failed), options.seeds))
    for figure in FIGURES:
        run.add(at_most(figure.replace("_", " "), cast("int", report[figure]), 0))


def _totals(outcomes: Sequence[Outcome]) -> tuple[Counter[str], Counter[str]]:
    """Return the injected faults and the checks of all outcomes, by kind."""
    faults: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.injected)
        checks.update(outcome.checks)
    return faults, checks


def summary(outcomes: Sequence[Outcome], first: int, wall_s: float) -> dict[str, object]:
    """Return the figures of the report."""
    faults, checks = _totals(outcomes)
    broken = [text for outcome in outcomes for text in outcome.broken]
    return {
        "seeds": len(outcomes),
        "first": first,
        "failed": [
            {"seed": outcome.seed, "command": outcome.command, "broken": outcome.broken}
            for outcome in outcomes
            if outcome.broken
        ],
        **{name: sum(text.startswith(beginning) for text in broken) for name, beginning in FIGURES.items()},
        "wall_s": round(wall_s, 1),
        "virtual_s": round(sum(outcome.virtual_s for outcome in outcomes)),
        "events": sum(outcome.events for outcome in outcomes),
        "faults": dict(sorted(faults.items())),
        "checks": dict(sorted(checks.items())),
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1000, help="number of runs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the runs (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print every event")


@contextlib.contextmanager
def _outcomes(options: argparse.Namespace) -> Iterator[Iterator[Outcome]]:
    """Yield the outcomes as they arrive. The processes are forked here, before this process has any thread."""
    seeds = [(seed, options.verbose) for seed in range(options.first, options.first + options.seeds)]
    gc.collect()
    gc.freeze()  # what is imported now is never garbage, and collecting after each run looks past it
    if options.processes < 2 or options.seeds < 2:
        yield map(_simulate, seeds)
        return
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        yield pool.imap_unordered(_simulate, seeds, chunksize=2)


def _simulate(job: tuple[int, bool]) -> Outcome:
    seed, verbose = job
    return simulate(seed, verbose=verbose)


def _report_failures(outcomes: Iterable[Outcome], progress: ProgressDisplay) -> Iterator[Outcome]:
    """Yield the outcomes, and print a seed with a broken promise at once."""
    failed = 0
    for outcome in outcomes:
        failed += bool(outcome.broken)
        progress.advance(activity=f"{failed} failed")
        if outcome.broken:
            progress.print_line(f"seed {outcome.seed}: {outcome.broken[0]}")
        yield outcome


PROGRAM = Program("Run every service on a virtual clock while faults strike.", play, _add_arguments)
