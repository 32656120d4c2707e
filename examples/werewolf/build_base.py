"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of about a minute.

    python -m werewolf.build_base --cache ~/.cache/headrace/werewolf

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run. Villagers are
registered from the same folder and do not change.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from example_parts import bpe
from example_parts import warm_up as base_warm_up
from example_parts.base_model import Lesson
from werewolf.demonstrations import Message, demonstrate
from werewolf.policies import HABITS, KEEN
from werewolf.rules import NAMES, PLACES, WOODS, deals
from werewolf.talk import NOBODY

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 400
"""Vocabulary size. Bytes, markup and the words of the game with their merges need about 380 entries."""
WORDS = (
    *NAMES, *PLACES, WOODS, NOBODY, "You", "are", "villager", "werewolf", "with", "Say", "a", "place", "and", "suspect",
    "then", "vote", "suspected", "votes", "Speak", "Vote",
)  # fmt: skip


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on the moderator's texts."""
    return bpe.train(texts, WORDS, (), VOCABULARY)


@dataclass(frozen=True)
class Schedule(base_warm_up.Schedule):
    """The common schedule, with as many conversations in a step as three games have."""

    steps: int = 400
    batch: int = 18


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order: games of a split of their own."""
    rng = random.Random(f"warm-up {seed}")
    messages_of_seats: list[list[Message]] = []
    for deal in deals("warm_up", seed):
        messages_of_seats += demonstrate(deal, rng, KEEN if len(messages_of_seats) < schedule.shown_right else HABITS)
        if len(messages_of_seats) >= schedule.shown:
            return messages_of_seats[: schedule.shown]
    raise AssertionError("deals have no end")


LESSON = Lesson(
    name="werewolf",
    folder=Path(__file__).parent,
    modules=("rules", "policies", "talk", "demonstrations", "build_base"),
    definitions=(),
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=train_tokenizer,
)


if __name__ == "__main__":
    LESSON.command()
