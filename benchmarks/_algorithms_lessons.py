"""Warm-up lessons of the base models by name, and the function that builds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import _corrections, _corridor
from email_agent import build_base, warm_up
from example_parts.base_model import Lesson
from example_parts.warm_up import Schedule

_WEAK = warm_up.Schedule(lapses=0.9)
"""Schedule of the weak base. Nine of ten conversations at the end of its warm-up go wrong, so that it succeeds in one
or two of ten runs."""
LESSONS: Mapping[str, tuple[Lesson, Schedule]] = {
    "e-mail": (build_base.LESSON, build_base.LESSON.schedule),
    "e-mail, weak base": (build_base.LESSON, _WEAK),
    "e-mail with corrections": (_corrections.LESSON, _corrections.LESSON.schedule),
    "corridor": (_corridor.LESSON, _corridor.LESSON.schedule),
}


def base_of(lesson: str, seed: int, cache: Path) -> Path:
    """Return the folder of the base model of a seed. If it does not exist, build it first, which takes about a minute
    of one core."""
    lesson_of_base, schedule = LESSONS[lesson]
    return lesson_of_base.build(cache, lesson_of_base.recipe(seed, schedule)).absolute()
