"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up on the six seats of scripted
games.

    python -m werewolf.build_base --cache ~/.cache/headrace/werewolf

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run. Villagers are
registered from the same folder and do not change.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_parts import base_model
from example_parts.base_model import Lesson
from werewolf import policies, table
from werewolf.policies import HABITS, KEEN
from werewolf.table import NAMES, NOBODY, PLACES, WOODS, Deal, Game, deals

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, Any]
VOCABULARY = 400
"""Vocabulary size. Bytes, markup and the words of the game with their merges need about 380 entries."""
WORDS = (
    *NAMES, *PLACES, WOODS, NOBODY, "You", "are", "villager", "werewolf", "with", "Say", "a", "place", "and", "suspect",
    "then", "vote", "suspected", "votes", "Speak", "Vote",
)  # fmt: skip


def demonstrate(deal: Deal, rng: random.Random, habits: policies.Habits) -> list[list[Message]]:
    """Return a game of werewolves without abilities, as seen from each of the six seats."""
    game = policies.play(deal, (), rng, habits)
    return [_seen_by(name, game) for name in deal.seats]


def _seen_by(name: str, game: Game) -> list[Message]:
    return list(_messages(name, game))


def _messages(name: str, game: Game) -> Iterator[Message]:
    deal, seat = game.deal, game.deal.seats.index(name)
    yield {"role": "system", "content": table.role_prompt(deal, name)}
    yield {"role": "user", "content": table.speaking_prompt(name, game.talk[:seat])}
    yield {"role": "assistant", "content": table.answer_line(game.talk[seat])}
    partner = table.partners_vote(deal, name, game.votes)
    yield {"role": "user", "content": table.voting_prompt(name, game.talk, *partner)}
    yield {"role": "assistant", "content": game.votes[name] or table.NOBODY}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on the moderator's texts."""
    return base_model.train_tokenizer(texts, WORDS, (), VOCABULARY)


@dataclass(frozen=True)
class Schedule(base_model.Schedule):
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
    modules=("policies", "table", "build_base"),
    definitions=(),
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=train_tokenizer,
)


if __name__ == "__main__":
    LESSON.command()
