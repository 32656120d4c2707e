"""Runs of all training arms of `benchmarks.signals` in separate processes, and their section of the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, "examples")  # examples are not installed

from benchmarks._gains_arms import ARMS, Arm, Gain
from benchmarks._gains_lines import Gains, lines, misled, rows
from benchmarks._learning_lines import Line
from benchmarks._run_processes import play as play_apart
from benchmarks._run_processes import quietly


@dataclass(frozen=True)
class Job:
    """Description of a run, as it is sent to its process."""

    arm: str
    seed: int
    plays: int
    cache: Path

    def result_file(self, parts: Path) -> Path:
        name = self.arm.replace(", ", "-").replace(" ", "_")
        return parts / f"{name}-{self.seed}-{self.plays}.json"


def work(job: Job) -> Gain:
    """Run one job in the worker process."""
    from benchmarks._gains_run import LESSONS, run

    quietly()
    arm = ARMS[job.arm]
    lesson = LESSONS[arm.lesson]
    return run(arm, job.seed, lesson.build(job.cache, lesson.recipe(job.seed)).absolute(), job.plays)


def seeds_of(arm: Arm, seeds: range) -> list[int]:
    """Return the seeds of an arm.

    The luck of five seeds can amount to a whole round. Arms for which rounds are counted therefore get twice as many
    further seeds. The seeds between, 5 to 14, were used to tune `hindsight`.
    """
    further = range(seeds.stop + 10, seeds.stop + 10 + 2 * len(seeds))
    return [*seeds, *further] if arm.more_seeds else [*seeds]


def play(
    names: Sequence[str], seeds: range, plays: int, cache: Path, parts: Path, workers: int
) -> tuple[dict[str, object], list[Line]]:
    """Run the named arms. Return their section of the report, and the lines that must hold."""
    jobs = [Job(name, seed, plays, cache) for name in names for seed in seeds_of(ARMS[name], seeds)]
    gains = Gains(play_apart("bench-signals gains", jobs, parts, workers, work, Gain))
    acceptance_lines = lines(gains)
    seconds = {arm: [round(run.seconds) for run in runs] for arm, runs in gains.arms.items()}
    report: dict[str, object] = {"plays": plays, "runs": rows(gains), "run_seconds": seconds}
    if (misled_share := misled(gains)) is not None:
        report["trained although users misled"] = misled_share.mean
    return report | {"lines": [line.report() for line in acceptance_lines]}, acceptance_lines
