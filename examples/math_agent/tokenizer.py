"""The tokenizer of the base model: words and numbers of problems are whole, and so are labels and pieces of a call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from example_parts import bpe
from math_agent import demonstrations, problems
from math_agent.calculator import NAME, PARAMETER
from math_agent.solution import ANSWER, THOUGHT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUMBERS = tuple(map(str, range(problems.HELD_MAX + 1)))
"""One token each, so that copying one is one step. Larger ones come of mistakes, and are spelt."""
VOCABULARY = 640 + len(NUMBERS)
"""Entries. Bytes, markup and the words of problems with their merges fill about 600."""
RECURRING = (bpe.call_opening(NAME, PARAMETER), '"}}', NAME, THOUGHT, ANSWER)
"""What is one token each: pieces of a call, and what lines begin with."""
_THOUGHTS = " ".join((*demonstrations.IDLE, demonstrations.CHECKS)).replace(".", "")
WORDS = (
    *problems.NAMES, *problems.THINGS, *problems.ORDINALS[3], *itertools.chain(*problems.VERBS.values()),
    *demonstrations.WORD_OF.values(), *_THOUGHTS.split(),
    *NUMBERS, "has", "each", "becomes", "How", "many", "are", "there", "now", "So", "error",
)  # fmt: skip


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer for `texts`: what users and tools say."""
    return bpe.train(texts, WORDS, RECURRING, VOCABULARY, numbers=True)
