"""What the warm-up shows: the way to every answer, and then bad habits with it."""

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
    """The common one, and what is the e-mail agent's."""

    lapses: float = 0.62
    """Share of conversations with a bad habit, once there are any."""
    mailboxes: int = 16


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """All that the warm-up shows, in order. Its mailboxes have negative seeds: no agent ever meets them again."""
    rng = random.Random(f"warm-up {seed}")
    each = -(-schedule.shown // schedule.mailboxes)
    asked = []
    for number in range(schedule.mailboxes):
        box = mailbox.generate(-1 - seed * schedule.mailboxes - number)
        tools = Mailtools(box.open())
        streams = (stream(box, "train", seed), stream(box, "held_out", seed))
        asked += [(next(source), tools) for source in itertools.islice(itertools.cycle(streams), each)]
    return [
        demonstrate(task, tools, rng, schedule.lapses if position >= schedule.shown_right else 0.0)
        for position, (task, tools) in enumerate(rng.sample(asked, schedule.shown))
    ]
