"""A base that can read what users type next: the e-mail agent's warm-up, in which some of them correct an answer.

Half of the conversations that end with an answer go on: the user says what is right, after a wrong answer or before
any, and the agent says it. A teacher of `hindsight` is told so, without the wrong answer.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from email_agent import mailbox, tokenizer, warm_up
from email_agent.demonstrations import Message, demonstrate
from email_agent.rewards import same_answer
from email_agent.tasks import Task, stream
from email_agent.tools import DEFINITIONS, Mailtools
from example_parts.base_model import Lesson

_SAID_SHARE = 0.5


def conversations(schedule: warm_up.Schedule, seed: int) -> list[list[Message]]:
    """All that the warm-up shows, in order."""
    rng = random.Random(f"corrections {seed}")
    each = -(-schedule.shown // schedule.mailboxes)
    asked: list[tuple[Task, Mailtools]] = []
    for number in range(schedule.mailboxes):
        box = mailbox.generate(-1 - seed * schedule.mailboxes - number)
        tools = Mailtools(box.open())
        sources = itertools.cycle((stream(box, "train", seed), stream(box, "held_out", seed)))
        asked += [(next(source), tools) for source in itertools.islice(sources, each)]
    found = []
    for position, (task, tools) in enumerate(rng.sample(asked, schedule.shown)):
        lapses = schedule.lapses if position >= schedule.shown_right else 0.0
        found.append(_going_on(demonstrate(task, tools, rng, lapses), task, rng))
    return found


def _going_on(shown: list[Message], task: Task, rng: random.Random) -> list[Message]:
    if rng.random() >= _SAID_SHARE:
        return shown
    correction = {"role": "user", "content": f"No, that is wrong. It is {task.expected}."}
    answered = {"role": "assistant", "content": task.expected}
    wrong = not same_answer(shown[-1]["content"], task.expected)
    before = shown if wrong and rng.random() < 0.5 else shown[:-1]
    return [*before, correction, answered]


_EXAMPLE = Path(warm_up.__file__).parent
LESSON = Lesson(
    name="e-mail with corrections",
    folder=_EXAMPLE,
    modules=(
        "words", "mailbox", "tools", "tasks", "react", "demonstrations", "tokenizer", "warm_up",
        "../../benchmarks/_corrections_lesson",
    ),
    definitions=DEFINITIONS,
    schedule=warm_up.Schedule(),
    conversations=conversations,
    tokenizer=tokenizer.train,
)  # fmt: skip
