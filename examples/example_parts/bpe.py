"""The tokenizer of the base models: byte-level BPE, trained on what an example shows.

Spaces, and digits or whole numbers, are tokens of their own and the words of an example are whole, so that a word is
the same token wherever it stands: copying is most of what such a model has to learn.
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
    """How the JSON of a call begins, up to the value of its one argument."""
    return json.dumps({"name": tool, "arguments": {parameter: ""}}).removesuffix('"}}')


def train(
    texts: Iterable[str], words: Sequence[str], recurring: Sequence[str], entries: int, *, numbers: bool = False
) -> Tokenizer:
    """A tokenizer of at most so many `entries` for `texts`: what users and tools say.

    Each of `words` is a token if there is room for it. Each of `recurring`, pieces of tool calls, is one in any case.
    Digits are never merged, unless `numbers` may be words.
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
    whole = [AddedToken(text, normalized=False, special=False) for text in (*MARKUP, *recurring)]
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(whole),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary = " ".join((*words, *ROLES))
    tokenizer.train_from_iterator(itertools.chain(texts, itertools.repeat(vocabulary, 1000)), trainer)
    tokenizer.add_tokens(whole)
    return tokenizer
