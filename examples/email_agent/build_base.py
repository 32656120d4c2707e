"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of less than a minute.

    python -m email_agent.build_base --cache ~/.cache/headrace/email_agent

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from email_agent import demonstrations, mailbox
from email_agent.mailbox import DEFINITIONS, PARAMETER_OF
from example_parts import base_model
from example_parts.base_model import Lesson

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 704
"""Vocabulary size. Bytes, markup and the words of mailboxes with their merges need about 650 entries."""
RECURRING = (*(base_model.call_opening(*tool) for tool in PARAMETER_OF.items()), '"}}', *PARAMETER_OF)
"""Parts of tool calls that are one token each."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on texts of users and tools."""
    return base_model.train_tokenizer(texts, mailbox.ALL, RECURRING, VOCABULARY)


LESSON = Lesson(
    name="email_agent",
    folder=Path(__file__).parent,
    modules=("mailbox", "demonstrations", "build_base"),
    definitions=DEFINITIONS,
    schedule=demonstrations.Schedule(),
    conversations=demonstrations.conversations,
    tokenizer=train_tokenizer,
)

if __name__ == "__main__":
    LESSON.command()
