"""Does each algorithm learn from the signal that it is for? `python -m benchmarks.algorithms`.

Writes `reports/bench-algorithms.json`. Exit status 1 when one of its lines does not hold, over five seeds, each with a
mailbox, a base model and audit tasks of its own, which training never asks: each algorithm of the registry raises the
score over its base; with the same signal dealt out by lot none does, and it does better than with that; SFT and then RL
do better than RL alone with as many steps of it; rewards of turns do better than the reward of the run alone, on a task
of nine turns. An interval is Student's over seeds, 95 %, of gains on the same plays.

Each run is one process with the trainer, the engine and the demo's agent in it, without services. The e-mail agent's
users are the demo's (`email_agent.users`); `benchmarks._algorithms_arms` says who says what. `hindsight` begins with a
base that has seen corrections in its warm-up, and its gain is over that base. What was run lies under `--parts`, a file
for each run, and is not run again: a benchmark that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, "examples")  # examples are not installed

from benchmarks._algorithms_arms import arms
from benchmarks._algorithms_found import Arm, Found, Plan
from benchmarks._algorithms_lines import Table, lines, markdown
from benchmarks._runs_apart import play, quietly


@dataclass(frozen=True)
class Job:
    """A run to be done, as it travels to its process."""

    arm: str
    seed: int
    plan: Plan
    cache: Path
    versions: Path

    def place(self, parts: Path) -> Path:
        name = "".join(one if one.isalnum() else "_" for one in self.arm.replace("+", "p"))
        return parts / f"{name}-{self.seed}-{self.plan.steps}-{self.plan.plays}.json"


def work(job: Job) -> Found:
    """In a process of its own."""
    from benchmarks._algorithms_lessons import base_of
    from benchmarks._algorithms_run import run

    quietly()
    arm = next(one for one in arms() if one.name == job.arm)
    return run(arm, job.seed, base_of(arm.lesson, job.seed, job.cache), job.plan, job.versions)


def played(chosen: Sequence[Arm], options: argparse.Namespace, plan: Plan) -> Iterator[Found]:
    """All runs, seed by seed; those that learn from a version of another one after it."""
    versions = options.parts / "versions"
    for seed, taught in itertools.product(range(options.seeds), (False, True)):
        jobs = [Job(arm.name, seed, plan, options.cache, versions) for arm in chosen if bool(arm.teacher) is taught]
        # A process takes as long to import what it needs as for a run, so it has those of a seed.
        yield from play("bench-algorithms", jobs, options.parts, options.workers, work, Found, alone=False)


def main() -> int:
    known = arms()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of each run (%(default)s)")
    parser.add_argument("--plays", type=int, default=144, help="of audit tasks, for each score (%(default)s)")
    parser.add_argument("--only", nargs="*", metavar="RUN", help=f"of {'; '.join(arm.name for arm in known)}")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"), help="of base models (%(default)s)")
    parser.add_argument("--parts", type=Path, default=Path("reports/bench-algorithms"))
    parser.add_argument("--out", type=Path, default=Path("reports/bench-algorithms.json"))
    options = parser.parse_args()
    chosen = [arm for arm in known if options.only is None or arm.name in options.only or not arm.stages[0].share]
    began, runs = time.monotonic(), []
    for one in played(chosen, options, Plan(options.steps, options.plays)):
        runs.append(one)
        score = sum(value for _, value in one.scores) / len(one.scores)
        print(f"{one.arm:34} seed {one.seed}: {score:6.1%}, {one.seconds:.0f} s", flush=True)
    return conclude(Table(chosen, runs), options, time.monotonic() - began)


def conclude(table: Table, options: argparse.Namespace, seconds: float) -> int:
    """Report and table; the exit status."""
    found, rows = lines(table), table.rows()
    report = {
        "seeds": options.seeds,
        "steps": options.steps,
        "plays": options.plays,
        "runs": rows,
        "lines": [line.report() for line in found],
        "missed": [line.name for line in found if not line.holds],
        "run_seconds": round(sum(run.seconds for several in table.runs.values() for run in several)),
        "wall_s": round(seconds, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(markdown(rows))
    for line in found:
        print(line.told())
    return bool(report["missed"])


if __name__ == "__main__":
    sys.exit(main())
