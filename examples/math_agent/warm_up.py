"""What the warm-up shows: the way to every answer, and bad habits with it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from example_parts import warm_up
from math_agent.demonstrations import NONE, Habits, Message, demonstrate
from math_agent.problems import stream

HABITS = Habits(idle=0.52, doubt=0.22, mistake=0.25, sloppy=0.4)
"""Where the base model starts: 7 of 10 right, more than 8 steps where 5 would do, and 6 of 10 in form."""


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """The common one, and what is the math agent's."""

    steps: int = 600
    right_share: float = 0.0
    """Idle thoughts move what has to be copied: a model that has learned without them has to learn it again."""
    habits: Habits = HABITS
    """Of the conversations that come last."""


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """All that the warm-up shows, in order: problems of a split of their own."""
    rng = random.Random(f"warm-up {seed}")
    shown = itertools.islice(stream("warm_up", seed), schedule.shown)
    return [
        demonstrate(problem, rng, NONE if place < schedule.shown_right else schedule.habits)
        for place, problem in enumerate(shown)
    ]
