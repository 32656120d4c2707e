"""Tokenizer of the base model: every name and every word of the game is a single token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from example_parts import bpe
from werewolf.rules import NAMES, PLACES, WOODS
from werewolf.talk import NOBODY

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 400
"""Vocabulary size. Bytes, markup and the words of the game with their merges need about 380 entries."""
WORDS = (
    *NAMES, *PLACES, WOODS, NOBODY, "You", "are", "villager", "werewolf", "with", "Say", "a", "place", "and", "suspect",
    "then", "vote", "suspected", "votes", "Speak", "Vote",
)  # fmt: skip


def train(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on the moderator's texts."""
    return bpe.train(texts, WORDS, (), VOCABULARY)
