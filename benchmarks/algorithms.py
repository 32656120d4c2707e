"""Measure whether each algorithm learns from its signal: `python -m benchmarks.algorithms`.

The program writes `reports/bench-algorithms.json`, with exit status 1 if a line does not hold. The lines hold over five
seeds, each with its own mailbox, base model and audit tasks, which training never uses: each registered algorithm
improves the score over its base. With the same signal randomized, none does, and the real signal is better than the
randomized one. SFT followed by RL is better than RL alone with as many RL steps. Rewards of turns are better than the
reward of the run alone, on a task of nine turns. Intervals are 95 % intervals of Student's t over seeds, of gains on
the same plays.

Each run is one process with the trainer, the engine and the demo's agent, without services. The e-mail agent's users
are those of the demo (`email_agent.agent`), and `benchmarks._algorithms_lines` assigns signals to algorithms.
`hindsight` starts from a base that has seen corrections in its warm-up, and its gain is relative to that base. Results
are stored under `--parts`, a file for each run, so that an interrupted benchmark continues.
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

from benchmarks._algorithms_lines import Arm, Plan, RunResult, Table, arms, lines, markdown
from benchmarks._run_processes import play, quietly


@dataclass(frozen=True)
class Job:
    """Description of a run, as it is sent to its process."""

    arm: str
    seed: int
    plan: Plan
    cache: Path
    versions: Path

    def result_file(self, parts: Path) -> Path:
        name = "".join(letter if letter.isalnum() else "_" for letter in self.arm.replace("+", "p"))
        return parts / f"{name}-{self.seed}-{self.plan.steps}-{self.plan.plays}.json"


def work(job: Job) -> RunResult:
    """Run one job in the worker process."""
    from benchmarks._algorithms_run import base_of, run

    quietly()
    arm = next(arm for arm in arms() if arm.name == job.arm)
    return run(arm, job.seed, base_of(arm.lesson, job.seed, job.cache), job.plan, job.versions)


def run_arms(selected_arms: Sequence[Arm], options: argparse.Namespace, plan: Plan) -> Iterator[RunResult]:
    """Yield all runs, seed by seed. Arms with a teacher run after the arms without one."""
    versions = options.parts / "versions"
    for seed, has_teacher in itertools.product(range(options.seeds), (False, True)):
        jobs = [
            Job(arm.name, seed, plan, options.cache, versions)
            for arm in selected_arms
            if bool(arm.teacher) is has_teacher
        ]
        # Imports take as long as a run, so a process runs all jobs of a seed.
        yield from play("bench-algorithms", jobs, options.parts, options.workers, work, RunResult, alone=False)


def main() -> int:
    all_arms = arms()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each run (%(default)s)")
    parser.add_argument("--plays", type=int, default=144, help="audit tasks of each score (%(default)s)")
    parser.add_argument(
        "--only", nargs="*", metavar="RUN", help=f"run only these: {'; '.join(arm.name for arm in all_arms)}"
    )
    parser.add_argument("--workers", type=int, default=2, help="concurrent runs, a core each (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"), help="folder of base models (%(default)s)")
    parser.add_argument("--parts", type=Path, default=Path("reports/bench-algorithms"))
    parser.add_argument("--out", type=Path, default=Path("reports/bench-algorithms.json"))
    options = parser.parse_args()
    selected_arms = [
        arm for arm in all_arms if options.only is None or arm.name in options.only or not arm.stages[0].share
    ]
    began, runs = time.monotonic(), []
    for result in run_arms(selected_arms, options, Plan(options.steps, options.plays)):
        runs.append(result)
        score = sum(value for _, value in result.scores) / len(result.scores)
        print(f"{result.arm:34} seed {result.seed}: {score:6.1%}, {result.seconds:.0f} s", flush=True)
    return conclude(Table(selected_arms, runs), options, time.monotonic() - began)


def conclude(table: Table, options: argparse.Namespace, seconds: float) -> int:
    """Write the report, print the table, and return the exit status."""
    acceptance_lines, rows = lines(table), table.rows()
    report = {
        "seeds": options.seeds,
        "steps": options.steps,
        "plays": options.plays,
        "runs": rows,
        "lines": [line.report() for line in acceptance_lines],
        "missed": [line.name for line in acceptance_lines if not line.holds],
        "run_seconds": round(sum(run.seconds for several in table.runs.values() for run in several)),
        "wall_s": round(seconds, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(markdown(rows))
    for line in acceptance_lines:
        print(line.text())
    return bool(report["missed"])


if __name__ == "__main__":
    sys.exit(main())
