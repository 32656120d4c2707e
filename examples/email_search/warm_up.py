"""What the warm-up shows: the call for every query, and then bad habits with it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from email_agent import mailbox
from email_search.demonstrations import NONE, Habits, Message, demonstrate
from email_search.queries import stream
from example_parts import warm_up

HABITS = Habits(invented=0.14, confused=0.28, few=0.1, many=0.02)
"""Where the base model starts: the right tool 6 times in 10, all arguments right 5 times, 3 of 6 mails."""


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """The common one, and what is this agent's."""

    habits: Habits = HABITS
    """Of the conversations that come last."""
    mailboxes: int = 8


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """All that the warm-up shows, in order. Its mailboxes have negative seeds: no agent ever meets them again."""
    rng = random.Random(f"warm-up {seed}")
    boxes = (mailbox.generate(-1 - seed * schedule.mailboxes - number) for number in range(schedule.mailboxes))
    in_turn = zip(*(stream(box, "warm_up", seed) for box in boxes), strict=True)
    shown = itertools.islice(itertools.chain.from_iterable(in_turn), schedule.shown)
    return [
        demonstrate(query, rng, NONE if place < schedule.shown_right else schedule.habits)
        for place, query in enumerate(shown)
    ]
