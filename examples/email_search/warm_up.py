"""Conversations of the warm-up: the right call for every query first, then also bad habits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from email_agent import mailbox
from email_search.demonstrations import NONE, Habits, Message, demonstrate
from email_search.queries import stream
from example_parts import warm_up

HABITS = Habits(invented=0.14, confused=0.28, insufficient=0.1, excessive=0.02)
"""Habits of the base model, which calls the right tool 6 times in 10, with all arguments right 5 times, and finds 3 of
6 mails."""


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """The common schedule, with the settings of this agent."""

    habits: Habits = HABITS
    """Habits in the later conversations."""
    mailboxes: int = 8


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order. Its mailboxes have negative seeds, which agents never use."""
    rng = random.Random(f"warm-up {seed}")
    boxes = (mailbox.generate(-1 - seed * schedule.mailboxes - number) for number in range(schedule.mailboxes))
    alternating = zip(*(stream(box, "warm_up", seed) for box in boxes), strict=True)
    queries = itertools.islice(itertools.chain.from_iterable(alternating), schedule.shown)
    return [
        demonstrate(query, rng, NONE if number < schedule.shown_right else schedule.habits)
        for number, query in enumerate(queries)
    ]
