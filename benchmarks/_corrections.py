"""Corrections that informed users type: the tool that the agent should have called, or the right answer.

A base that has seen such messages can use them. In its warm-up, half of the conversations contain one, after a wrong
answer or at another point. The teacher of `hindsight` sees the correction without the wrong answer.

The right answer is not given every time, because a base that is given the answer repeats it without calling a tool, and
a student of that teacher would learn to guess.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from email_agent import build_base, demonstrations, mailbox
from email_agent.demonstrations import ROUTES, Message, demonstrate
from email_agent.rewards import same_answer
from email_agent.tasks import Kind, Task, stream
from email_agent.tools import DEFINITIONS, Mailtools
from example_parts.base_model import Lesson

_CORRECTED_SHARE = 0.5


def correction(kind: Kind, expected: str, messages: Sequence[Any]) -> str:
    """Return the correction of a wrong answer after `messages`."""
    calls = sum(message["role"] == "tool" for message in messages)
    route = ROUTES[kind]
    remedy = f"Use {route[calls]}" if calls < len(route) else f"It is {expected}"
    return f"No, that is wrong. {remedy}."


def conversations(schedule: demonstrations.Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order."""
    rng = random.Random(f"corrections {seed}")
    questions = [question for number in range(schedule.mailboxes) for question in _questions(schedule, seed, number)]
    result = []
    for position, (task, tools) in enumerate(rng.sample(questions, schedule.shown)):
        lapses = schedule.lapses if position >= schedule.shown_right else 0.0
        result.append(_with_correction(demonstrate(task, tools, rng, lapses), task, tools, rng))
    return result


def _questions(schedule: demonstrations.Schedule, seed: int, number: int) -> list[tuple[Task, Mailtools]]:
    """Return questions about one mailbox of the warm-up, with its tools."""
    box = mailbox.generate(-1 - seed * schedule.mailboxes - number)
    tools, each = Mailtools(box.open()), -(-schedule.shown // schedule.mailboxes)
    both = itertools.cycle((stream(box, "train", seed), stream(box, "held_out", seed)))
    return [(next(source), tools) for source in itertools.islice(both, each)]


def _with_correction(conversation: list[Message], task: Task, tools: Mailtools, rng: random.Random) -> list[Message]:
    """Return a conversation that continues with a correction and the right steps, or the conversation itself.

    The correction follows the wrong steps, or an equal number of right steps.
    """
    if rng.random() >= _CORRECTED_SHARE:
        return conversation
    right = demonstrate(task, tools, rng, 0.0)
    wrong = not same_answer(conversation[-1]["content"], task.expected)
    is_complete = sum(message["role"] == "tool" for message in conversation) == len(ROUTES[task.kind])
    if wrong and rng.random() < 0.5 and (is_complete or conversation[:-1] == right[: len(conversation) - 1]):
        before, rest = conversation, right[-1:] if is_complete else right[len(conversation) - 1 :]
    else:
        steps = rng.choice((2, 4, len(right) - 1))
        before, rest = right[:steps], right[steps:]
    user_message = {"role": "user", "content": correction(task.kind, task.expected, before)}
    return [*before, user_message, *rest]


LESSON = Lesson(
    name="e-mail with corrections",
    folder=Path(demonstrations.__file__).parent,
    modules=(
        "mailbox", "tools", "tasks", "demonstrations", "rewards", "build_base",
        "../../benchmarks/_corrections",
    ),
    definitions=DEFINITIONS,
    schedule=demonstrations.Schedule(),
    conversations=conversations,
    tokenizer=build_base.train_tokenizer,
)  # fmt: skip
