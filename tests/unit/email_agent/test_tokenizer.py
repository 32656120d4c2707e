from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import Tokenizer

from email_agent import tokenizer as own
from email_agent import words
from email_agent.demonstrations import demonstrate
from email_agent.mailbox import Mailbox
from email_agent.tasks import stream
from email_agent.tools import PARAMETER_OF, Mailtools
from example_parts import bpe

from .rendering import render


@pytest.fixture(scope="module")
def shown(box: Mailbox, tools: Mailtools) -> list[str]:
    rng = random.Random(0)
    asked = itertools.islice(stream(box, "train", 0), 120)
    return [render(demonstrate(task, tools, rng, lapses=0.5)) for task in asked]


@pytest.fixture(scope="module")
def tokenizer(shown: list[str]) -> Tokenizer:
    return own.train(shown)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    found: list[str] = tokenizer.encode(text).tokens
    return found


def test_every_conversation_comes_back_as_it_was(tokenizer: Tokenizer, shown: list[str]) -> None:
    for text in (*shown, "Grüße, 漢字 und 🙂\t\n\x00 <tool_call", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_markup_and_words_are_one_token_and_digits_are_single(tokenizer: Tokenizer) -> None:
    for text in (*bpe.CONTROL, *bpe.MARKUP, *own.RECURRING, *words.ALL):
        assert len(tokenizer.encode(text).ids) == 1, text
    assert tokens(tokenizer, "417") == ["4", "1", "7"]


def test_a_word_is_the_same_token_wherever_it_stands(tokenizer: Tokenizer) -> None:
    harbor = tokenizer.token_to_id("harbor")
    for text in ("harbor", "the harbor", '"harbor"', "harbor:"):
        assert harbor in tokenizer.encode(text).ids


def test_a_call_takes_few_tokens(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "read_mail", "arguments": {"thread": "a1"}}</tool_call><|im_end|>'
    assert len(tokenizer.encode(call).ids) == 7
    assert bpe.call_opening("read_mail", "thread") == '{"name": "read_mail", "arguments": {"thread": "'


def test_only_control_tokens_are_special(tokenizer: Tokenizer) -> None:
    """A parser must see the markup of calls even where special tokens are left out, as with Qwen's own tokenizer."""
    text = "<|im_start|>assistant\n<tool_call>{}</tool_call><|im_end|>"
    kept = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True)
    assert kept == "assistant\n<tool_call>{}</tool_call>"


def test_it_is_small(tokenizer: Tokenizer) -> None:
    assert 600 <= tokenizer.get_vocab_size() <= own.VOCABULARY
    assert len(PARAMETER_OF) == 7
