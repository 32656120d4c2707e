"""The tokenizer of the base model: the words of mailboxes are whole, and so are the recurring pieces of calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from email_agent import words
from email_agent.tools import PARAMETER_OF
from example_parts import bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 704
"""Entries. Bytes, markup and the words of mailboxes with their merges fill about 650."""
RECURRING = (*(bpe.call_opening(*tool) for tool in PARAMETER_OF.items()), '"}}', *PARAMETER_OF)
"""Pieces of tool calls that are one token each."""


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer for `texts`: what users and tools say."""
    return bpe.train(texts, words.ALL, RECURRING, VOCABULARY)
