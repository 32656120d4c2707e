"""Tokenizer of the base models: byte-level BPE, trained on the conversations of an example.

Spaces, and digits or whole numbers, are separate tokens, and the words of an example are single tokens. A word is
therefore the same token in any position, which matters because such a model must mainly learn to copy.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
ROLES = ("system", "user", "assistant")
END = "<|im_end|>"
PADDING = "<|endoftext|>"


def call_opening(tool: str, parameter: str) -> str:
    """Return the beginning of a call's JSON, up to the value of its one argument."""
    return json.dumps({"name": tool, "arguments": {parameter: ""}}).removesuffix('"}}')


def train(
    texts: Iterable[str], words: Sequence[str], recurring: Sequence[str], entries: int, *, numbers: bool = False
) -> Tokenizer:
    """Train a tokenizer with at most `entries` entries on texts of users and tools.

    Args:
        words: words that become tokens if there is room.
        recurring: parts of tool calls that always become tokens.
        numbers: whether whole numbers may be words; otherwise digits are never merged.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    digits = r"\d+" if numbers else r"\d"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"{digits}|\s|[A-Za-z]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added_tokens = [AddedToken(text, normalized=False, special=False) for text in (*MARKUP, *recurring)]
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(added_tokens),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary = " ".join((*words, *ROLES))
    tokenizer.train_from_iterator(itertools.chain(texts, itertools.repeat(vocabulary, 1000)), trainer)
    tokenizer.add_tokens(added_tokens)
    return tokenizer
