"""Does each algorithm learn from the signal that it is for? `python -m benchmarks.algorithms`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, "examples")  # examples are not installed

from benchmarks._algorithms_arms import arms
from benchmarks._algorithms_found import Found, Plan
from benchmarks._runs_apart import quietly

NICE = 5


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
    from benchmarks import _corrections_lesson, _corridor
    from benchmarks._algorithms_run import run
    from email_agent.build_base import LESSON

    quietly(NICE)
    lessons = {one.name: one for one in (LESSON, _corridor.LESSON, _corrections_lesson.LESSON)} | {"e-mail": LESSON}
    arm = next(one for one in arms() if one.name == job.arm)
    lesson = lessons[arm.lesson]
    return run(arm, job.seed, lesson.build(job.cache, lesson.recipe(job.seed)).absolute(), job.plan, job.versions)


def found_in(path: Path) -> Found:
    """A run that was done before."""
    return Found(**json.loads(path.read_text(encoding="utf-8")))
