"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of about a minute.

    python -m math_agent.build_base --cache ~/.cache/headrace/math_agent

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from example_parts import bpe
from example_parts import warm_up as base_warm_up
from example_parts.base_model import Lesson
from math_agent import demonstrations, problems
from math_agent.calculator import DEFINITIONS, NAME, PARAMETER
from math_agent.demonstrations import NONE, Habits, Message, demonstrate
from math_agent.problems import stream
from math_agent.solution import ANSWER, THOUGHT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUMBERS = tuple(map(str, range(problems.HELD_MAX + 1)))
"""Numbers that are one token each, so that copying one is one step. Larger numbers result from mistakes, and are
split."""
VOCABULARY = 640 + len(NUMBERS)
"""Vocabulary size. Bytes, markup and the words of problems with their merges need about 600 entries."""
RECURRING = (bpe.call_opening(NAME, PARAMETER), '"}}', NAME, THOUGHT, ANSWER)
"""Parts of calls and labels of lines that are one token each."""
_THOUGHTS = " ".join((*demonstrations.IDLE, demonstrations.CHECKS)).replace(".", "")
WORDS = (
    *problems.NAMES, *problems.THINGS, *problems.ORDINALS[3], *itertools.chain(*problems.VERBS.values()),
    *demonstrations.WORD_OF.values(), *_THOUGHTS.split(),
    *NUMBERS, "has", "each", "becomes", "How", "many", "are", "there", "now", "So", "error",
)  # fmt: skip


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on texts of users and tools."""
    return bpe.train(texts, WORDS, RECURRING, VOCABULARY, numbers=True)


HABITS = Habits(idle=0.52, repeat_call=0.22, mistake=0.25, sloppy=0.4)
"""Habits of the base model, which is right in 7 of 10, takes more than 8 steps where 5 are enough, and has the form in
6 of 10."""


@dataclass(frozen=True)
class Schedule(base_warm_up.Schedule):
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
        "problems", "calculator", "solution", "demonstrations", "build_base",
    ),
    definitions=DEFINITIONS,
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=train_tokenizer,
)  # fmt: skip


if __name__ == "__main__":
    LESSON.command()
