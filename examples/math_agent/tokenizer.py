"""Tokenizer of the base model: words and numbers of problems, labels and parts of a call are single tokens."""

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


def train(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on texts of users and tools."""
    return bpe.train(texts, WORDS, RECURRING, VOCABULARY, numbers=True)
