"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of less than a minute.

    python -m email_search.build_base --cache ~/.cache/headrace/email_search

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from email_agent import mailbox, words
from email_search import queries
from email_search.demonstrations import INVENTED, NONE, Habits, Message, demonstrate
from email_search.queries import stream
from email_search.tools import DEFINITIONS, LIMIT, TOOLS
from example_parts import bpe
from example_parts import warm_up as base_warm_up
from example_parts.base_model import Lesson

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 640
"""Vocabulary size. Bytes, markup and the words of queries with their merges need about 600 entries."""
_PARAMETERS = {**{name: tool.parameter for name, tool in TOOLS.items()}, **INVENTED}
RECURRING = (*(bpe.call_opening(*tool) for tool in _PARAMETERS.items()), f'", {json.dumps(LIMIT)}: ', "}}", *TOOLS)
"""Parts of tool calls that are one token each."""
_QUESTION_TEXTS = " ".join((*queries.OPENINGS, *itertools.chain(*queries.WORDINGS.values())))
WORDS = (*words.ALL, *sorted(set(re.findall(r"[A-Za-z]+", _QUESTION_TEXTS))))


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on users' texts."""
    return bpe.train(texts, WORDS, RECURRING, VOCABULARY)


HABITS = Habits(invented=0.14, confused=0.28, insufficient=0.1, excessive=0.02)
"""Habits of the base model, which calls the right tool 6 times in 10, with all arguments right 5 times, and finds 3 of
6 mails."""


@dataclass(frozen=True)
class Schedule(base_warm_up.Schedule):
    """The common schedule, with the settings of this agent."""

    habits: Habits = HABITS
    """Habits in the later conversations."""
    mailboxes: int = 8


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order. Its mailboxes have negative seeds, which agents never use."""
    rng = random.Random(f"warm-up {seed}")
    boxes = (mailbox.generate(-1 - seed * schedule.mailboxes - number) for number in range(schedule.mailboxes))
    alternating = zip(*(stream(box, "warm_up", seed) for box in boxes), strict=True)
    shown = itertools.islice(itertools.chain.from_iterable(alternating), schedule.shown)
    return [
        demonstrate(query, rng, NONE if number < schedule.shown_right else schedule.habits)
        for number, query in enumerate(shown)
    ]


LESSON = Lesson(
    name="email_search",
    folder=Path(__file__).parent,
    modules=(
        "../email_agent/words", "../email_agent/mailbox", "tools", "queries", "demonstrations", "build_base",
    ),
    definitions=DEFINITIONS,
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=train_tokenizer,
)  # fmt: skip


if __name__ == "__main__":
    LESSON.command()
