"""`python -m tests.simulation --seeds 1000 --first 0`: many runs on all cores, and a report."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from headrace_cli.progress import ProgressDisplay
from tests.simulation.run import Outcome, simulate

_SHOWN_MAX = 10
FIGURES = {"wrong_last_words": "p10_late: wrong last word", "verdicts_on_the_wrong_run": "p10_late: wrong run"}
"""Named figures of the report, and what a broken promise that counts for them begins with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every promise held in every run."""
    given = _parse(arguments)
    began = time.perf_counter()
    with _played(given) as played, ProgressDisplay("simulate", given.seeds, unit="seeds") as progress:
        outcomes = list(_watched(played, progress))
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


@contextlib.contextmanager
def _played(given: argparse.Namespace) -> Iterator[Iterator[Outcome]]:
    """The outcomes, as they come. The processes are forked here, before anything has started a thread."""
    seeds = [(seed, given.verbose) for seed in range(given.first, given.first + given.seeds)]
    gc.collect()
    gc.freeze()  # what is imported now is never garbage, and collecting after each run looks past it
    if given.processes < 2 or given.seeds < 2:
        yield map(_simulate, seeds)
        return
    with multiprocessing.get_context("fork").Pool(given.processes) as pool:
        yield pool.imap_unordered(_simulate, seeds, chunksize=2)


def _simulate(job: tuple[int, bool]) -> Outcome:
    seed, verbose = job
    return simulate(seed, verbose=verbose)


def _watched(outcomes: Iterable[Outcome], progress: ProgressDisplay) -> Iterator[Outcome]:
    """Says at once which seed broke a promise."""
    failed = 0
    for outcome in outcomes:
        failed += bool(outcome.broken)
        progress.advance(doing=f"{failed} failed")
        if outcome.broken:
            progress.say(f"seed {outcome.seed}: {outcome.broken[0]}")
        yield outcome


if __name__ == "__main__":
    sys.exit(main())
