"""Conversations of the warm-up: scripted games from every seat, first of players that never hesitate."""

from __future__ import annotations

import random
from dataclasses import dataclass

from example_parts import warm_up
from werewolf.demonstrations import Message, demonstrate
from werewolf.policies import HABITS, KEEN
from werewolf.rules import deals


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """The common schedule, with as many conversations in a step as three games have."""

    steps: int = 400
    batch: int = 18


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order: games of a split of their own."""
    rng = random.Random(f"warm-up {seed}")
    messages_of_seats: list[list[Message]] = []
    for deal in deals("warm_up", seed):
        messages_of_seats += demonstrate(deal, rng, KEEN if len(messages_of_seats) < schedule.shown_right else HABITS)
        if len(messages_of_seats) >= schedule.shown:
            return messages_of_seats[: schedule.shown]
    raise AssertionError("deals have no end")
