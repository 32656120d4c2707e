"""`python -m tests.simulation --seeds 1000 --first 0`: many runs on all cores, and a report."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.simulation.run import Outcome, simulate

_SHOWN_MAX = 10
_SAID_EVERY_S = 10.0
FIGURES = {"wrong_last_words": "p10_late: wrong last word", "verdicts_on_the_wrong_run": "p10_late: wrong run"}
"""Named figures of the report, and what a broken promise that counts for them begins with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every promise held in every run."""
    given = _parse(arguments)
    console = Console(stderr=True)
    began = time.perf_counter()
    outcomes = list(_watched(_outcomes(given), given.seeds, console))
    report = summary(outcomes, given.first, time.perf_counter() - began)
    if given.report:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for outcome in outcomes if given.verbose else ():
        print("\n".join(outcome.story))
    failed = [outcome for outcome in outcomes if outcome.broken]
    for outcome in failed[:_SHOWN_MAX]:
        print(f"seed {outcome.seed} broke a promise; again: {outcome.command}")
        print("".join(f"    {text}\n" for text in outcome.broken), end="")
    checks, faults = sum(report["checks"].values()), sum(report["faults"].values())  # type: ignore[attr-defined]
    print(
        f"{given.seeds} seeds from {given.first} in {report['wall_s']} s: {report['events']} events, {faults} faults, "
        f"{checks} checks, {len(failed)} seeds failed"
    )
    print(", ".join(f"{name.replace('_', ' ')}: {report[name]}" for name in FIGURES))
    return 1 if failed else 0


def summary(outcomes: Iterable[Outcome], first: int, wall_s: float) -> dict[str, object]:
    """What `reports/simulate.json` holds."""
    faults: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    figures = dict.fromkeys(FIGURES, 0)
    events, virtual_s, seeds, failed = 0, 0.0, 0, []
    for outcome in outcomes:
        faults.update(outcome.injected)
        checks.update(outcome.checks)
        seeds, events, virtual_s = seeds + 1, events + outcome.events, virtual_s + outcome.virtual_s
        for name, beginning in FIGURES.items():
            figures[name] += sum(text.startswith(beginning) for text in outcome.broken)
        if outcome.broken:
            failed.append({"seed": outcome.seed, "command": outcome.command, "broken": outcome.broken})
    return {
        "seeds": seeds,
        "first": first,
        "failed": failed,
        **figures,
        "wall_s": round(wall_s, 1),
        "virtual_s": round(virtual_s),
        "events": events,
        "faults": dict(sorted(faults.items())),
        "checks": dict(sorted(checks.items())),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the runs (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="write a JSON report to this file")
    parser.add_argument("--verbose", action="store_true", help="print everything that happened")
    return parser.parse_args(arguments)


def _outcomes(given: argparse.Namespace) -> Iterator[Outcome]:
    seeds = [(seed, given.verbose) for seed in range(given.first, given.first + given.seeds)]
    gc.collect()
    gc.freeze()  # what is imported now is never garbage, and collecting after each run looks past it
    if given.processes < 2 or given.seeds < 2:
        yield from map(_simulate, seeds)
        return
    with multiprocessing.get_context("fork").Pool(given.processes) as pool:
        yield from pool.imap_unordered(_simulate, seeds, chunksize=2)


def _simulate(job: tuple[int, bool]) -> Outcome:
    seed, verbose = job
    return simulate(seed, verbose=verbose)


def _watched(outcomes: Iterable[Outcome], total: int, console: Console) -> Iterator[Outcome]:
    """With a bar on a terminal, a line now and then in a log."""
    if not console.is_terminal:
        yield from _logged(outcomes, total, console)
        return
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=total)
        for outcome in outcomes:
            progress.advance(task)
            if outcome.broken:
                progress.console.print(f"seed {outcome.seed}: {outcome.broken[0]}", highlight=False)
            yield outcome


def _logged(outcomes: Iterable[Outcome], total: int, console: Console) -> Iterator[Outcome]:
    began = said = time.monotonic()
    failed = 0
    for number, outcome in enumerate(outcomes, 1):
        if outcome.broken:
            failed += 1
            console.print(f"seed {outcome.seed}: {outcome.broken[0]}", highlight=False, soft_wrap=True)
        now = time.monotonic()
        if now - said >= _SAID_EVERY_S:
            said = now
            left_s = (now - began) / number * (total - number)
            console.print(f"{number} of {total} seeds, {failed} failed, about {left_s:.0f} s left", highlight=False)
        yield outcome


if __name__ == "__main__":
    sys.exit(main())
