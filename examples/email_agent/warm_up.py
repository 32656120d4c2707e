"""Conversations of the warm-up: right steps to every answer first, then also bad habits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from email_agent import mailbox
from email_agent.demonstrations import Message, demonstrate
from email_agent.tasks import stream
from email_agent.tools import Mailtools
from example_parts import warm_up


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """The common schedule, with the settings of the e-mail agent."""

    lapses: float = 0.62
    """Share of conversations with a bad habit, once they occur."""
    mailboxes: int = 16


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order. Its mailboxes have negative seeds, which agents never use."""
    rng = random.Random(f"warm-up {seed}")
    each = -(-schedule.shown // schedule.mailboxes)
    questions = []
    for number in range(schedule.mailboxes):
        box = mailbox.generate(-1 - seed * schedule.mailboxes - number)
        tools = Mailtools(box.open())
        streams = (stream(box, "train", seed), stream(box, "held_out", seed))
        questions += [(next(source), tools) for source in itertools.islice(itertools.cycle(streams), each)]
    return [
        demonstrate(task, tools, rng, schedule.lapses if position >= schedule.shown_right else 0.0)
        for position, (task, tools) in enumerate(rng.sample(questions, schedule.shown))
    ]
