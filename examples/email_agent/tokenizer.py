"""Tokenizer of the base model: the words of mailboxes and the recurring parts of calls are single tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from email_agent import words
from email_agent.tools import PARAMETER_OF
from example_parts import bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 704
"""Vocabulary size. Bytes, markup and the words of mailboxes with their merges need about 650 entries."""
RECURRING = (*(bpe.call_opening(*tool) for tool in PARAMETER_OF.items()), '"}}', *PARAMETER_OF)
"""Parts of tool calls that are one token each."""


def train(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on texts of users and tools."""
    return bpe.train(texts, words.ALL, RECURRING, VOCABULARY)
