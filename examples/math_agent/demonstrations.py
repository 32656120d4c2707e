"""Conversations for the warm-up: a pupil who knows the way, and has bad habits.

The habits decide where the base model starts. It copies them as faithfully as the right way, and learns from its own
traffic which of them pays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from math_agent.calculator import NAME, PARAMETER, Calculator
from math_agent.problems import RESULT, Change, Problem
from math_agent.react import SYSTEM
from math_agent.solution import ANSWER, THOUGHT

Message = dict[str, Any]

Mistake = Literal["sign", "hasty", "start"]
"""Takes another sign than the sentence says; answers before the last change; goes on from the number of the start."""
Sloppiness = Literal["bare", "chatty", "unlabelled"]
"""Answers with the number alone; with a sentence; thinks without saying that it is a thought."""
MISTAKES: tuple[Mistake, ...] = Mistake.__args__  # type: ignore[attr-defined]
SLOPPINESS: tuple[Sloppiness, ...] = Sloppiness.__args__  # type: ignore[attr-defined]

WORD_OF: Mapping[str, str] = {"+": "add", "-": "take", "*": "times"}
IDLE = ("let me see.", "slowly now.", "one by one.")
CHECKS = "check it."
IDLE_MAX = 2
"""Idle thoughts in one message."""


@dataclass(frozen=True)
class Habits:
    """How often a conversation shows what."""

    idle: float = 0.0
    """Before each thought and each answer: a thought that leads nowhere, and then perhaps another one."""
    doubt: float = 0.0
    """After each call: the same call again."""
    mistake: float = 0.0
    """Once in a conversation."""
    sloppy: float = 0.0
    """All through a conversation."""


NONE = Habits()


def demonstrate(problem: Problem, rng: random.Random, habits: Habits) -> list[Message]:
    """A whole conversation about `problem`."""
    mistake = rng.choice(MISTAKES) if rng.random() < habits.mistake else None
    sloppy = rng.choice(SLOPPINESS) if rng.random() < habits.sloppy else None
    conversation = _Conversation(problem, rng, habits, "" if sloppy == "unlabelled" else THOUGHT)
    changes = list(problem.changes)
    wrong = rng.randrange(1, len(changes)) if mistake == "start" else rng.randrange(len(changes))
    if mistake == "hasty":
        changes.pop()
    held = str(problem.start)
    for place, change in enumerate(changes):
        begun = str(problem.start) if mistake == "start" and place == wrong else held
        sign = _another(change, rng) if mistake == "sign" and place == wrong else change.sign
        held = conversation.calculate(f"{change.ordinal} {WORD_OF[sign]} {change.number}.", begun, sign, change.number)
    ending = {"bare": held, "chatty": f"So there are {held} {problem.things}."}
    return conversation.answer(ending.get(sloppy or "", f"{ANSWER}{held}"))


class _Conversation:
    def __init__(self, problem: Problem, rng: random.Random, habits: Habits, label: str) -> None:
        self._rng = rng
        self._habits = habits
        self._label = label
        self._messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": problem.question},
        ]

    def calculate(self, thought: str, held: str, sign: str, number: int) -> str:
        """Think and call, and perhaps call again; returns what the calculator answered."""
        arguments = json.dumps({PARAMETER: f"{held} {sign} {number}"})
        result = self._call([*self._idle(), thought], arguments)
        if self._rng.random() < self._habits.doubt:
            self._call([CHECKS], arguments)
        return result

    def answer(self, text: str) -> list[Message]:
        lines = [*(f"{self._label}{thought}" for thought in self._idle()), text]
        return [*self._messages, {"role": "assistant", "content": "\n".join(lines)}]

    def _call(self, thoughts: list[str], arguments: str) -> str:
        result = Calculator().call(NAME, arguments)
        call = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": arguments}}
        said = "\n".join(f"{self._label}{thought}" for thought in thoughts)
        self._messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
        self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return result

    def _idle(self) -> list[str]:
        thoughts: list[str] = []
        while len(thoughts) < IDLE_MAX and self._rng.random() < self._habits.idle:
            thoughts.append(self._rng.choice(IDLE))
        return thoughts


def _another(change: Change, rng: random.Random) -> str:
    return rng.choice([sign for sign in RESULT if sign != change.sign])
