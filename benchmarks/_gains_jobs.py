"""All runs that train a model, in processes of their own, and the section of the report that they make."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, "examples")  # examples are not installed

from benchmarks._gains_arms import ARMS
from benchmarks._gains_found import Arm, Gain
from benchmarks._gains_lines import Gains, lines, misled, rows
from benchmarks._learning_lines import Line
from benchmarks._runs_apart import play as play_apart
from benchmarks._runs_apart import quietly


@dataclass(frozen=True)
class Job:
    """A run to be done, as it travels to its process."""

    arm: str
    seed: int
    plays: int
    cache: Path

    def place(self, parts: Path) -> Path:
        name = self.arm.replace(", ", "-").replace(" ", "_")
        return parts / f"{name}-{self.seed}-{self.plays}.json"


def work(job: Job) -> Gain:
    """In a process of its own."""
    from benchmarks._gains_run import LESSONS, run

    quietly()
    arm = ARMS[job.arm]
    lesson = LESSONS[arm.lesson]
    return run(arm, job.seed, lesson.build(job.cache, lesson.recipe(job.seed)).absolute(), job.plays)


def seeds_of(arm: Arm, seeds: range) -> list[int]:
    """The seeds of a run. The luck of five seeds can be a whole round, so where rounds are counted there are twice as
    many more, ten further on: with those between, 5 to 14, it was chosen how `hindsight` learns."""
    further = range(seeds.stop + 10, seeds.stop + 10 + 2 * len(seeds))
    return [*seeds, *further] if arm.more_seeds else [*seeds]


def play(
    names: Sequence[str], seeds: range, plays: int, cache: Path, parts: Path, workers: int
) -> tuple[dict[str, object], list[Line]]:
    """Their section of the report, and the lines that have to hold."""
    jobs = [Job(name, seed, plays, cache) for name in names for seed in seeds_of(ARMS[name], seeds)]
    found = Gains(play_apart("bench-signals gains", jobs, parts, workers, work, Gain))
    made = lines(found)
    seconds = {arm: [round(run.seconds) for run in runs] for arm, runs in found.arms.items()}
    report: dict[str, object] = {"plays": plays, "runs": rows(found), "run_seconds": seconds}
    if (told := misled(found)) is not None:
        report["trained although users misled"] = told.mean
    return report | {"lines": [line.report() for line in made]}, made
