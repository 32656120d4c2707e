"""Generated mails, and questions for two of their facts, in sets without a common mail."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "gate", "audit"]
"""Sets of mails: the agent's own traffic, the gate, which decides about versions, and the audit, which only
measures."""
SPLITS: tuple[Split, ...] = Split.__args__  # type: ignore[attr-defined]

FACTS = {
    "topic": (
        "the budget", "the new website", "our hiring plan", "the spring release", "the office move",
        "customer feedback", "the training plan", "the annual report", "the press visit", "the supplier contract",
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
    "time": tuple(f"{hour}:{minute}" for hour in range(8, 18) for minute in ("00", "15", "30", "45")),
    "room": tuple(f"room {number}" for number in range(101, 160)),
    "sender": (
        "Anna Berg", "Ben Carter", "Clara Diaz", "David Evans", "Emma Fischer", "Felix Grant", "Grace Hill", "Hugo Ito",
        "Iris Jensen", "Jonas Klein", "Leon Meyer", "Mia Novak", "Nora Olsen", "Oscar Perez", "Paula Quinn",
    ),
}  # fmt: skip
TEXTS = (
    "We talk about {topic} on {day} at {time} in {room}.",
    "Please come to {room} on {day} at {time}. The subject is {topic}.",
    "Our meeting about {topic} takes place in {room}, {day}, {time}.",
    "On {day} we meet at {time} to discuss {topic}. I booked {room}.",
)
ANSWERS = {
    "Day and time?": "{day}, {time}",
    "Room and time?": "{room}, {time}",
    "Sender and day?": "{sender}, {day}",
    "Sender and time?": "{sender}, {time}",
}
"""Format of the answer to each question."""
EXAMPLE = {"topic": "the picnic", "day": "Monday", "time": "7:20", "room": "room 12", "sender": "Tom Reed"}
"""Facts of the mail that each conversation shows as an example. No other mail has them."""


@dataclass(frozen=True)
class Task:
    """A mail with a question, and the one right answer."""

    id: str
    kind: str
    """Question about the mail."""
    mail: str
    expected: str

    @property
    def messages(self) -> list[Any]:
        return [
            {"role": "user", "content": f"{_mail(TEXTS[0], EXAMPLE)}\n\n{self.kind}"},
            {"role": "assistant", "content": ANSWERS[self.kind].format(**EXAMPLE)},
            {"role": "user", "content": f"{self.mail}\n\n{self.kind}"},
        ]


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer is exactly the expected one, apart from white space around it."""
    return answer.strip() == expected


def stream(split: Split, seed: int) -> Iterator[Task]:
    """Yield tasks of a split without end, each question equally often."""
    draw = random.Random(f"mails {split} {seed}")
    while True:
        for question in ANSWERS:
            yield _task(draw, split, question)


def _task(draw: random.Random, split: Split, question: str) -> Task:
    """Draw mails until one belongs to the split, which the text of the mail determines."""
    while True:
        facts = {name: draw.choice(values) for name, values in FACTS.items()}
        mail = _mail(draw.choice(TEXTS), facts)
        digest = hashlib.sha256(mail.encode()).hexdigest()
        if SPLITS[int(digest, 16) % len(SPLITS)] == split:
            expected = ANSWERS[question].format(**facts)
            return Task(f"{digest[:12]} {question}", question, mail, expected)


def _mail(text: str, facts: Mapping[str, str]) -> str:
    return f"{text.format(**facts)}\nBest regards,\n{facts['sender']}"
