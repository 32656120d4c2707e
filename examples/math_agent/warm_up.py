"""Conversations of the warm-up: right steps to every answer, with bad habits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from example_parts import warm_up
from math_agent.demonstrations import NONE, Habits, Message, demonstrate
from math_agent.problems import stream

HABITS = Habits(idle=0.52, repeat_call=0.22, mistake=0.25, sloppy=0.4)
"""Habits of the base model, which is right in 7 of 10, takes more than 8 steps where 5 are enough, and has the form in
6 of 10."""


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """The common schedule, with the settings of the math agent."""

    steps: int = 600
    right_share: float = 0.0
    """No conversations without habits, because idle thoughts move the position of copied words, which a model would
    have to learn again."""
    habits: Habits = HABITS
    """Habits in the later conversations."""


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order: problems of a split of their own."""
    rng = random.Random(f"warm-up {seed}")
    problems = itertools.islice(stream("warm_up", seed), schedule.shown)
    return [
        demonstrate(problem, rng, NONE if number < schedule.shown_right else schedule.habits)
        for number, problem in enumerate(problems)
    ]
