"""The tokenizer of the base model: every name and every word of the game is whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from example_parts import bpe
from werewolf.rules import NAMES, PLACES, WOODS
from werewolf.talk import NOBODY

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 400
"""Entries. Bytes, markup and the words of the game with their merges fill about 380."""
WORDS = (
    *NAMES, *PLACES, WOODS, NOBODY, "You", "are", "villager", "werewolf", "with", "Say", "a", "place", "and", "suspect",
    "then", "vote", "suspected", "votes", "Speak", "Vote",
)  # fmt: skip


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer for `texts`: what the moderator says."""
    return bpe.train(texts, WORDS, (), VOCABULARY)
