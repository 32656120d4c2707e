"""What the warm-up shows: games by script, from every seat; first of players who never hesitate."""

from __future__ import annotations

import random
from dataclasses import dataclass

from example_parts import warm_up
from werewolf.demonstrations import Message, demonstrate
from werewolf.policies import HABITS, KEEN
from werewolf.rules import deals


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """The common one, with as many conversations in a step as three games have."""

    steps: int = 400
    batch: int = 18


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """All that the warm-up shows, in order: games of a split of their own."""
    rng = random.Random(f"warm-up {seed}")
    shown: list[list[Message]] = []
    for deal in deals("warm_up", seed):
        shown += demonstrate(deal, rng, KEEN if len(shown) < schedule.shown_right else HABITS)
        if len(shown) >= schedule.shown:
            return shown[: schedule.shown]
    raise AssertionError("deals have no end")
