"""Tests of the e-mail agent's chat template, rendered as by transformers, and of its tokenizer."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from email_agent import build_base, mailbox
from email_agent.demonstrations import demonstrate
from email_agent.mailbox import DEFINITIONS, PARAMETER_OF, SYSTEM, Mailbox, Mailtools, stream
from example_parts import base_model
from example_parts.base_model import TEMPLATE
from headrace_inference.chat.tool_calls import HermesToolReader


def render(
    messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = DEFINITIONS, generate: bool = False
) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(messages=messages, tools=tools, add_generation_prompt=generate)


OPENING = "<|im_start|>assistant\n"
ASKED = {"role": "user", "content": "Who wrote last about harbor budget?"}


def called(arguments: Any, content: str | None = None, **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "read_mail", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def test_a_whole_conversation() -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        ASKED,
        called({"thread": "a1"}),
        {"role": "tool", "tool_call_id": "call_1", "content": "From: Anna Berg"},
        {"role": "assistant", "content": "Anna Berg"},
    ]
    assert render(messages) == (
        f"<|im_start|>system\n{SYSTEM}\n{' '.join(PARAMETER_OF)} <|im_end|>\n"
        "<|im_start|>user\nWho wrote last about harbor budget?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "read_mail", "arguments": {"thread": "a1"}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>From: Anna Berg</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nAnna Berg<|im_end|>\n"
    )


@pytest.mark.parametrize("arguments", [{"thread": "ä1"}, '{"thread": "ä1"}'])
def test_arguments_may_come_as_an_object_or_as_the_text_of_one(arguments: Any) -> None:
    assert '"arguments": {"thread": "ä1"}}</tool_call>' in render([ASKED, called(arguments)])


def test_what_the_model_thought_and_said_beside_a_call_stays_in_its_place() -> None:
    assert (
        '<think>hm</think>Let me see.<tool_call>{"name": "read_mail", "arguments": {}}</tool_call><|im_end|>'
    ) in render([ASKED, called({}, "Let me see.", reasoning_content="hm")])


def test_answers_of_tools_that_were_called_together_are_one_block() -> None:
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    block = "<tool_response>one</tool_response><tool_response>two</tool_response>"
    assert f"<|im_start|>user\n{block}<|im_end|>\n" in render([ASKED, called({}), *results])


def test_no_tools_and_no_system_message_leave_no_system_block() -> None:
    assert render([ASKED], tools=None) == f"<|im_start|>user\n{ASKED['content']}<|im_end|>\n"


def test_each_turn_continues_the_one_before_it(box: Mailbox, tools: Mailtools) -> None:
    """Each prompt begins with the previous prompt and answer, so that a run is one branch (pitfall 7)."""
    for task in itertools.islice(stream(box, "train", 0), 60):
        messages = demonstrate(task, tools, random.Random(task.id), lapses=0.5)
        rendered = render(messages)
        for position, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = render(messages[:position], generate=True)
                assert rendered.startswith(prompt)
                assert prompt.endswith(OPENING)


def test_what_the_template_renders_is_what_the_parser_of_the_engine_reads(box: Mailbox, tools: Mailtools) -> None:
    for task in itertools.islice(stream(box, "train", 0), 60):
        messages = demonstrate(task, tools, random.Random(task.id), lapses=0.5)
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = render(messages[:position], generate=True)
            text = render(messages[: position + 1]).removeprefix(prompt).removesuffix("<|im_end|>\n")
            parser = HermesToolReader()
            parsed, rest = parser.feed(text), parser.end()
            calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
            expected = [call["function"] for call in message.get("tool_calls", [])]
            assert calls == [(function["name"], json.loads(function["arguments"])) for function in expected]
            assert parsed.content + rest.content == (message["content"] or "")


@pytest.fixture(scope="module")
def shown(box: Mailbox, tools: Mailtools) -> list[str]:
    rng = random.Random(0)
    streamed = itertools.islice(stream(box, "train", 0), 120)
    return [render(demonstrate(task, tools, rng, lapses=0.5)) for task in streamed]


@pytest.fixture(scope="module")
def tokenizer(shown: list[str]) -> Tokenizer:
    return build_base.train_tokenizer(shown)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    pieces: list[str] = tokenizer.encode(text).tokens
    return pieces


def test_every_conversation_comes_back_as_it_was(tokenizer: Tokenizer, shown: list[str]) -> None:
    for text in (*shown, "Grüße, 漢字 und 🙂\t\n\x00 <tool_call", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_markup_and_words_are_one_token_and_digits_are_single(tokenizer: Tokenizer) -> None:
    for text in (*base_model.CONTROL, *base_model.MARKUP, *build_base.RECURRING, *mailbox.ALL):
        assert len(tokenizer.encode(text).ids) == 1, text
    assert tokens(tokenizer, "417") == ["4", "1", "7"]


def test_a_word_is_the_same_token_wherever_it_stands(tokenizer: Tokenizer) -> None:
    harbor = tokenizer.token_to_id("harbor")
    for text in ("harbor", "the harbor", '"harbor"', "harbor:"):
        assert harbor in tokenizer.encode(text).ids


def test_a_call_takes_few_tokens(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "read_mail", "arguments": {"thread": "a1"}}</tool_call><|im_end|>'
    assert len(tokenizer.encode(call).ids) == 7
    assert base_model.call_opening("read_mail", "thread") == '{"name": "read_mail", "arguments": {"thread": "'


def test_only_control_tokens_are_special(tokenizer: Tokenizer) -> None:
    """Parsers need the markup of tool calls even if special tokens are skipped, as in Qwen's tokenizer."""
    text = "<|im_start|>assistant\n<tool_call>{}</tool_call><|im_end|>"
    decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True)
    assert decoded == "assistant\n<tool_call>{}</tool_call>"


def test_it_is_small(tokenizer: Tokenizer) -> None:
    assert 600 <= tokenizer.get_vocab_size() <= build_base.VOCABULARY
    assert len(PARAMETER_OF) == 7
