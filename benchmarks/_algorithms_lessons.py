"""What bases were taught, by name, and where they are built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import _corrections, _corridor
from email_agent import build_base, warm_up
from example_parts.base_model import Lesson
from example_parts.warm_up import Schedule

_WEAK = warm_up.Schedule(lapses=0.9)
"""Nine of ten conversations that it saw last go wrong: it finds the way in one or two of ten."""
LESSONS: Mapping[str, tuple[Lesson, Schedule]] = {
    "e-mail": (build_base.LESSON, build_base.LESSON.schedule),
    "e-mail, weak base": (build_base.LESSON, _WEAK),
    "e-mail with corrections": (_corrections.LESSON, _corrections.LESSON.schedule),
    "corridor": (_corridor.LESSON, _corridor.LESSON.schedule),
}


def base_of(lesson: str, seed: int, cache: Path) -> Path:
    """The folder of the base model of a seed, built first unless it is there: some minute of one core."""
    taught, schedule = LESSONS[lesson]
    return taught.build(cache, taught.recipe(seed, schedule)).absolute()
