"""The tokenizer of the base model: byte-level BPE, trained on demonstrations.

Digits and spaces are tokens of their own and the words of mailboxes are whole, so that a word is the same token
wherever it stands: copying is most of what the model has to learn.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from email_agent import words
from email_agent.tools import PARAMETER_OF

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
ROLES = ("system", "user", "assistant")
END = "<|im_end|>"
PADDING = "<|endoftext|>"
VOCABULARY = 704
"""Entries. Bytes, markup and the words of mailboxes with their merges fill about 650."""


def call_opening(tool: str) -> str:
    """How the JSON of a call begins, up to the value of its one argument."""
    return json.dumps({"name": tool, "arguments": {PARAMETER_OF[tool]: ""}}).removesuffix('"}}')


RECURRING = (*map(call_opening, PARAMETER_OF), '"}}', *PARAMETER_OF)
"""Pieces of tool calls that are one token each."""


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer for `texts`: what users and tools say."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\s|[A-Za-z]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    whole = [AddedToken(text, normalized=False, special=False) for text in (*MARKUP, *RECURRING)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(whole),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary = " ".join((*words.ALL, *ROLES))
    tokenizer.train_from_iterator(itertools.chain(texts, itertools.repeat(vocabulary, 1000)), trainer)
    tokenizer.add_tokens(whole)
    return tokenizer
