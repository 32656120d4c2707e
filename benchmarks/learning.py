"""Measure whether the reward causes learning, by controls of the demo's training: `python -m benchmarks.learning`.

The program writes `reports/bench-learning.json` and `reports/learning.png`, with exit status 1 if a line does not hold.
The lines hold over five seeds, each with its own mailbox, base model and held-out tasks: the true reward gains 20
points. Shuffled and random rewards and a learning rate of 0 stay within two standard errors of the base. Flipped
rewards lower the score, and the gate refuses all of their versions. Training on samples of the version of four steps
before loses at most two points. The guard detects training by the format alone in four runs of five, and never training
by the true reward.
With the runs of one seed `headrace controls` never reports a problem of the true reward, and always one of recorded
rewards that were shuffled (`--only true shuffled` trains these alone).
The agent with typed answers gains as much with held calls as with free ones, within two standard errors.

Steps are shorter than the demo's, which has three minutes. The effect of noise grows with the square root of the steps
and learning with the steps, so that more and shorter steps learn as much with less noise. With `--learning-rate 2e-4
--steps 20` the steps are the demo's, and random rewards degrade the model.

Each run is one process with the trainer, the engine and the demo's own agent, without services. Results are stored
under `--parts`, a file for each run, so that an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, "examples")  # examples are not installed

from benchmarks import _learning_lines
from benchmarks._learning_lines import Arm, Plan, RunResult, Table, lines, markdown
from benchmarks._run_processes import play, quietly
from headrace_operations.controls import kinds
from headrace_operations.controls.kinds import Control
from headrace_schemas import Branch, Experience

SOURCES = ("function:answer", "function:evidence", "function:tool_use")
LAGS = (2, 4, 8)


def _ignore_sets(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
    """Remove the grammars, so that the trainer treats restricted tokens as free ones."""
    return [
        experience.model_copy(update={"branch": _without_grammars(experience.branch)}) for experience in experiences
    ]


def _without_grammars(branch: Branch | None) -> Branch | None:
    if branch is None:
        return None
    spans = tuple(span.model_copy(update={"grammar": None}) for span in branch.spans)
    return branch.model_copy(update={"grammars": (), "spans": spans})


SETS_IGNORED = Control(
    "sets ignored",
    "held tokens trained with the softmax over all tokens, as most trainers do",
    "open",
    "nothing is lost by ignoring the token sets here",
    _ignore_sets,
)
ARMS = (
    Arm(kinds.TRUE, traced=True, runs_gate=True),
    Arm(kinds.SHUFFLED),
    Arm(kinds.FLIPPED, runs_gate=True),
    Arm(kinds.RANDOM),
    Arm(kinds.STILL),
    *(Arm(kinds.only_source(source), traced=source == SOURCES[-1]) for source in SOURCES),
    *(Arm(kinds.TRUE, lag=lag) for lag in LAGS),
    Arm(kinds.TRUE, answers="free"),
    Arm(kinds.TRUE, answers="held"),
    Arm(kinds.SHUFFLED, answers="held"),
    Arm(SETS_IGNORED, answers="held"),
)


@dataclass(frozen=True)
class Job:
    """Description of a run, as it is sent to its process."""

    arm: str
    seed: int
    plan: Plan
    cache: Path

    def result_file(self, parts: Path) -> Path:
        plan = self.plan
        name = f"{self.arm}-{self.seed}-{plan.steps}-{plan.learning_rate:g}-{plan.plays}-{plan.traced}".replace(
            " ", "_"
        ).replace(":", "_")
        return parts / f"{name}.json"


def work(job: Job) -> RunResult:
    """Run one job in the worker process."""
    from benchmarks._learning_run import run
    from email_agent.build_base import LESSON
    from email_agent.typed import TYPED_LESSON

    quietly()
    arm = next(arm for arm in ARMS if arm.name == job.arm)
    lesson = LESSON if arm.answers == "bare" else TYPED_LESSON
    return run(arm, job.seed, lesson.build(job.cache, lesson.recipe(job.seed)).absolute(), job.plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of 64 episodes in each run (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-5, help="learning rate (%(default)s)")
    parser.add_argument("--plays", type=int, default=144, help="audit tasks of each score (%(default)s)")
    parser.add_argument("--traced", type=int, default=15, help="intermediate scores of a traced run (%(default)s)")
    parser.add_argument(
        "--only", nargs="*", metavar="RUN", help=f"run only these: {', '.join(arm.name for arm in ARMS)}"
    )
    parser.add_argument("--workers", type=int, default=2, help="concurrent runs, a core each (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"), help="folder of base models (%(default)s)")
    parser.add_argument("--parts", type=Path, default=Path("reports/bench-learning"))
    parser.add_argument("--out", type=Path, default=Path("reports/bench-learning.json"))
    options = parser.parse_args()
    plan = Plan(options.steps, options.learning_rate, options.plays, options.traced)
    names = [arm.name for arm in ARMS if options.only is None or arm.name in options.only]
    # Seed by seed, so that an interrupted benchmark has whole seeds.
    jobs = [Job(name, seed, plan, options.cache) for seed in range(options.seeds) for name in names]
    began, runs = time.monotonic(), []
    for result in play("bench-learning", jobs, options.parts, options.workers, work, RunResult):
        runs.append(result)
        table = Table([result])
        score, gain = table.score(result.arm).value, table.gain(result.arm).value
        print(f"{result.arm:26} seed {result.seed}: {score:6.1%} ({gain:+.1%})", flush=True)
    runs.sort(key=lambda run: names.index(run.arm))
    return conclude(Table(runs), options, time.monotonic() - began)


def conclude(table: Table, options: argparse.Namespace, seconds: float) -> int:
    """Write the report and the plot, print the table, and return the exit status."""
    acceptance_lines = lines(table)
    rows = table.rows()
    report = {
        "seeds": options.seeds,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "plays": options.plays,
        "base": table.score_of_base().report(),
        "runs": rows,
        "lines": [line.report() for line in acceptance_lines],
        "missed": [line.name for line in acceptance_lines if not line.holds],
        "run_seconds": [round(run.seconds) for runs in table.arms.values() for run in runs],
        "wall_s": round(seconds, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _learning_lines.draw(table, options.out.with_name("learning.png"))
    print(markdown(rows, table.score_of_base()))
    for line in acceptance_lines:
        print(
            f"{'holds' if line.holds else 'FAILS'}  {line.value:8.3f} in {line.low:.3f} .. {line.high:.3f}  {line.name}"
        )
    return bool(report["missed"])


if __name__ == "__main__":
    sys.exit(main())
