"""Is it the reward that teaches? Controls of the demo's training: `python -m benchmarks.learning`.

Writes `reports/bench-learning.json` and `reports/learning.png`. Exit status 1 when one of its lines does not hold, over
five seeds (each with a mailbox, a base model and held-out tasks of its own): the true reward gains 20 points; shuffled
and random rewards and a learning rate of 0 stay within two standard errors of the base; flipped ones fall, and the gate
lets none of their versions pass; training what the version of four steps before has sampled loses two points at most;
the guard calls training by the format alone hacked in four runs of five, and none by the true reward.

Steps are shorter than the demo's, which has three minutes. What noise moves grows with the root of the steps, and what
there is to learn with the steps, so more and shorter ones learn the same with less noise. With `--learning-rate 2e-4
--steps 20` they are the demo's, and rewards by lot ruin the model.

Each run is one process with the trainer, the engine and the demo's own agent in it, without services. What was run
lies under `--parts`, a file for each run, and is not run again: a benchmark that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, "examples")  # examples are not installed

from benchmarks import _learning_plot
from benchmarks._learning_found import Arm, Found, Plan
from benchmarks._learning_lines import Table, lines, markdown
from benchmarks._runs_apart import play, quietly
from headrace_cli.controls import kinds

SOURCES = ("function:answer", "function:evidence", "function:tool_use")
LAGS = (2, 4, 8)
ARMS = (
    Arm(kinds.TRUE, traced=True, tried=True),
    Arm(kinds.SHUFFLED),
    Arm(kinds.FLIPPED, tried=True),
    Arm(kinds.RANDOM),
    Arm(kinds.STILL),
    *(Arm(kinds.alone(source), traced=source == SOURCES[-1]) for source in SOURCES),
    *(Arm(kinds.TRUE, lag=lag) for lag in LAGS),
)


@dataclass(frozen=True)
class Job:
    """A run to be done, as it travels to its process."""

    arm: str
    seed: int
    plan: Plan
    cache: Path

    def place(self, parts: Path) -> Path:
        plan = self.plan
        name = f"{self.arm}-{self.seed}-{plan.steps}-{plan.learning_rate:g}-{plan.plays}-{plan.traced}".replace(
            " ", "_"
        ).replace(":", "_")
        return parts / f"{name}.json"


def work(job: Job) -> Found:
    """In a process of its own."""
    from benchmarks._learning_run import run
    from email_agent.build_base import LESSON

    quietly()
    arm = next(one for one in ARMS if one.name == job.arm)
    return run(arm, job.seed, LESSON.build(job.cache, LESSON.recipe(job.seed)).absolute(), job.plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of 64 episodes, in each run (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-5, help="of each step (%(default)s)")
    parser.add_argument("--plays", type=int, default=144, help="of audit tasks, for each score (%(default)s)")
    parser.add_argument("--traced", type=int, default=15, help="scores on the way of a traced run (%(default)s)")
    parser.add_argument("--only", nargs="*", metavar="RUN", help=f"of {', '.join(arm.name for arm in ARMS)}")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"), help="of base models (%(default)s)")
    parser.add_argument("--parts", type=Path, default=Path("reports/bench-learning"))
    parser.add_argument("--out", type=Path, default=Path("reports/bench-learning.json"))
    options = parser.parse_args()
    plan = Plan(options.steps, options.learning_rate, options.plays, options.traced)
    names = [arm.name for arm in ARMS if options.only is None or arm.name in options.only]
    # Seed by seed, so that an interrupted benchmark has whole seeds.
    jobs = [Job(name, seed, plan, options.cache) for seed in range(options.seeds) for name in names]
    began, runs = time.monotonic(), []
    for one in play("bench-learning", jobs, options.parts, options.workers, work, Found):
        runs.append(one)
        table = Table([one])
        print(f"{one.arm:26} seed {one.seed}: {table.score(one.arm).value:6.1%} ({table.gain(one.arm).value:+.1%})",
              flush=True)  # fmt: skip
    runs.sort(key=lambda one: names.index(one.arm))
    return conclude(Table(runs), options, time.monotonic() - began)


def conclude(table: Table, options: argparse.Namespace, seconds: float) -> int:
    """Report, table and picture; the exit status."""
    found = lines(table)
    rows = table.rows()
    report = {
        "seeds": options.seeds,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "plays": options.plays,
        "base": table.score_of_base().report(),
        "runs": rows,
        "lines": [line.report() for line in found],
        "missed": [line.name for line in found if not line.holds],
        "run_seconds": [round(run.seconds) for runs in table.arms.values() for run in runs],
        "wall_s": round(seconds, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _learning_plot.draw(table, options.out.with_name("learning.png"))
    print(markdown(rows, table.score_of_base()))
    for line in found:
        print(
            f"{'holds' if line.holds else 'FAILS'}  {line.value:8.3f} in {line.low:.3f} .. {line.high:.3f}  {line.name}"
        )
    return bool(report["missed"])


if __name__ == "__main__":
    sys.exit(main())
