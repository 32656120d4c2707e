"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up on conversations of a pupil
with bad habits.

    python -m math_agent.build_base --cache ~/.cache/headrace/math_agent

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run.

The habits determine where the base model starts. The model imitates them as well as the right steps, and learns from
its own traffic which of them are rewarded.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from example_parts import base_model
from example_parts.base_model import Lesson
from math_agent import solution
from math_agent.solution import (
    ANSWER,
    DEFINITIONS,
    NAME,
    PARAMETER,
    RESULT,
    SYSTEM,
    THOUGHT,
    Calculator,
    Change,
    Problem,
    stream,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, Any]

Mistake = Literal["sign", "hasty", "start"]
"""Mistakes: using another sign than the sentence, answering before the last change, and continuing from the start
number."""
Sloppiness = Literal["bare", "chatty", "unlabelled"]
"""Wrong forms: answering with the number alone, answering with a sentence, and thoughts without a label."""
MISTAKES: tuple[Mistake, ...] = Mistake.__args__  # type: ignore[attr-defined]
SLOPPINESS: tuple[Sloppiness, ...] = Sloppiness.__args__  # type: ignore[attr-defined]

WORD_OF: Mapping[str, str] = {"+": "add", "-": "take", "*": "times"}
IDLE = ("let me see.", "slowly now.", "one by one.")
CHECKS = "check it."
IDLE_MAX = 2
"""Maximum number of idle thoughts in one message."""
NUMBERS = tuple(map(str, range(solution.HELD_MAX + 1)))
"""Numbers that are one token each, so that copying one is one step. Larger numbers result from mistakes, and are
split."""
VOCABULARY = 640 + len(NUMBERS)
"""Vocabulary size. Bytes, markup and the words of problems with their merges need about 600 entries."""
RECURRING = (base_model.call_opening(NAME, PARAMETER), '"}}', NAME, THOUGHT, ANSWER)
"""Parts of calls and labels of lines that are one token each."""
_THOUGHTS = " ".join((*IDLE, CHECKS)).replace(".", "")
WORDS = (
    *solution.NAMES, *solution.THINGS, *solution.ORDINALS[3], *itertools.chain(*solution.VERBS.values()),
    *WORD_OF.values(), *_THOUGHTS.split(),
    *NUMBERS, "has", "each", "becomes", "How", "many", "are", "there", "now", "So", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Habits:
    """Probabilities of the bad habits."""

    idle: float = 0.0
    """Idle thoughts before each thought and each answer."""
    repeat_call: float = 0.0
    """Repetition of a call."""
    mistake: float = 0.0
    """One mistake in a conversation."""
    sloppy: float = 0.0
    """A wrong form throughout a conversation."""


NONE = Habits()


def demonstrate(problem: Problem, rng: random.Random, habits: Habits) -> list[Message]:
    """Return a whole conversation about `problem`."""
    mistake = rng.choice(MISTAKES) if rng.random() < habits.mistake else None
    sloppy = rng.choice(SLOPPINESS) if rng.random() < habits.sloppy else None
    conversation = _Conversation(problem, rng, habits, "" if sloppy == "unlabelled" else THOUGHT)
    changes = list(problem.changes)
    wrong = rng.randrange(1, len(changes)) if mistake == "start" else rng.randrange(len(changes))
    if mistake == "hasty":
        changes.pop()
    amount = str(problem.start)
    for number, change in enumerate(changes):
        before = str(problem.start) if mistake == "start" and number == wrong else amount
        sign = _another_sign(change, rng) if mistake == "sign" and number == wrong else change.sign
        thought = f"{change.ordinal} {WORD_OF[sign]} {change.number}."
        amount = conversation.calculate(thought, before, sign, change.number)
    ending = {"bare": amount, "chatty": f"So there are {amount} {problem.item_name}."}
    return conversation.answer(ending.get(sloppy or "", f"{ANSWER}{amount}"))


class _Conversation:
    def __init__(self, problem: Problem, rng: random.Random, habits: Habits, label: str) -> None:
        self._rng = rng
        self._habits = habits
        self._label = label
        self._messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": problem.question},
        ]

    def calculate(self, thought: str, amount: str, sign: str, number: int) -> str:
        """Write a thought and a call, and possibly repeat the call. Return the calculator's result."""
        arguments = json.dumps({PARAMETER: f"{amount} {sign} {number}"})
        result = self._call([*self._idle(), thought], arguments)
        if self._rng.random() < self._habits.repeat_call:
            self._call([CHECKS], arguments)
        return result

    def answer(self, text: str) -> list[Message]:
        lines = [*(f"{self._label}{thought}" for thought in self._idle()), text]
        return [*self._messages, {"role": "assistant", "content": "\n".join(lines)}]

    def _call(self, thoughts: list[str], arguments: str) -> str:
        result = Calculator().call(NAME, arguments)
        call = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": arguments}}
        text = "\n".join(f"{self._label}{thought}" for thought in thoughts)
        self._messages.append({"role": "assistant", "content": text, "tool_calls": [call]})
        self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return result

    def _idle(self) -> list[str]:
        thoughts: list[str] = []
        while len(thoughts) < IDLE_MAX and self._rng.random() < self._habits.idle:
            thoughts.append(self._rng.choice(IDLE))
        return thoughts


def _another_sign(change: Change, rng: random.Random) -> str:
    return rng.choice([sign for sign in RESULT if sign != change.sign])


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on texts of users and tools."""
    return base_model.train_tokenizer(texts, WORDS, RECURRING, VOCABULARY, numbers=True)


HABITS = Habits(idle=0.52, repeat_call=0.22, mistake=0.25, sloppy=0.4)
"""Habits of the base model, which is right in 7 of 10, takes more than 8 steps where 5 are enough, and has the form in
6 of 10."""


@dataclass(frozen=True)
class Schedule(base_model.Schedule):
    """The common schedule, with the settings of the math agent."""

    steps: int = 600
    right_share: float = 0.0
    """No conversations without habits, because idle thoughts move the position of copied words, which a model would
    have to learn again."""
    habits: Habits = HABITS
    """Habits in the later conversations."""


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order: problems of a split of their own."""
    rng = random.Random(f"warm-up {seed}")
    shown = itertools.islice(stream("warm_up", seed), schedule.shown)
    return [
        demonstrate(problem, rng, NONE if number < schedule.shown_right else schedule.habits)
        for number, problem in enumerate(shown)
    ]


LESSON = Lesson(
    name="math_agent",
    folder=Path(__file__).parent,
    modules=(
        "solution", "build_base",
    ),
    definitions=DEFINITIONS,
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=train_tokenizer,
)  # fmt: skip


if __name__ == "__main__":
    LESSON.command()
