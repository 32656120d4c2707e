"""What users type who know the way: which tool the agent should have asked, or what is right.

A base that has seen such messages can use them: half of the conversations of its warm-up have one, after a wrong answer
or in place of any. The teacher of `hindsight` is told so, without the wrong answer.

Why not the right answer each time: a base that is told the answer says it and asks no tool, and whoever learns from
that teacher learns to guess.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from email_agent import mailbox, tokenizer, warm_up
from email_agent.demonstrations import ROUTES, Message, demonstrate
from email_agent.rewards import same_answer
from email_agent.tasks import Kind, Task, stream
from email_agent.tools import DEFINITIONS, Mailtools
from example_parts.base_model import Lesson

_SAID_SHARE = 0.5


def correction(kind: Kind, expected: str, messages: Sequence[Any]) -> str:
    """Of a wrong answer after `messages`."""
    asked = sum(message["role"] == "tool" for message in messages)
    route = ROUTES[kind]
    remedy = f"Use {route[asked]}" if asked < len(route) else f"It is {expected}"
    return f"No, that is wrong. {remedy}."


def conversations(schedule: warm_up.Schedule, seed: int) -> list[list[Message]]:
    """All that the warm-up shows, in order."""
    rng = random.Random(f"corrections {seed}")
    asked = [one for number in range(schedule.mailboxes) for one in _asked(schedule, seed, number)]
    found = []
    for position, (task, tools) in enumerate(rng.sample(asked, schedule.shown)):
        lapses = schedule.lapses if position >= schedule.shown_right else 0.0
        found.append(_going_on(demonstrate(task, tools, rng, lapses), task, tools, rng))
    return found


def _asked(schedule: warm_up.Schedule, seed: int, number: int) -> list[tuple[Task, Mailtools]]:
    """Questions about a mailbox of the warm-up's."""
    box = mailbox.generate(-1 - seed * schedule.mailboxes - number)
    tools, each = Mailtools(box.open()), -(-schedule.shown // schedule.mailboxes)
    both = itertools.cycle((stream(box, "train", seed), stream(box, "held_out", seed)))
    return [(next(source), tools) for source in itertools.islice(both, each)]


def _going_on(shown: list[Message], task: Task, tools: Mailtools, rng: random.Random) -> list[Message]:
    """After what was wrong, or after as many right steps, the user says what to do, and the agent does it."""
    if rng.random() >= _SAID_SHARE:
        return shown
    right = demonstrate(task, tools, rng, 0.0)
    wrong = not same_answer(shown[-1]["content"], task.expected)
    whole = sum(message["role"] == "tool" for message in shown) == len(ROUTES[task.kind])
    if wrong and rng.random() < 0.5 and (whole or shown[:-1] == right[: len(shown) - 1]):
        before, rest = shown, right[-1:] if whole else right[len(shown) - 1 :]
    else:
        steps = rng.choice((2, 4, len(right) - 1))
        before, rest = right[:steps], right[steps:]
    said = {"role": "user", "content": correction(task.kind, task.expected, before)}
    return [*before, said, *rest]


LESSON = Lesson(
    name="e-mail with corrections",
    folder=Path(warm_up.__file__).parent,
    modules=(
        "words", "mailbox", "tools", "tasks", "react", "demonstrations", "rewards", "tokenizer", "warm_up",
        "../../benchmarks/_corrections",
    ),
    definitions=DEFINITIONS,
    schedule=warm_up.Schedule(),
    conversations=conversations,
    tokenizer=tokenizer.train,
)  # fmt: skip
