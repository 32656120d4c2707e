"""Tests of parsers that need token ids: streams and plain answers give equal results. Contract tests cover vLLM's
own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace_inference.chat.answer import AnswerParser, AnswerSyntax
from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserContext,
    Parsers,
    ReasoningParser,
    ToolParser,
)
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.vllm_engine import parsers
from headrace_inference.vllm_engine.parsers import VllmReasoning, VllmTools
from headrace_runtime.registries import PluginError
from headrace_schemas import Message, Tool

CALL = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
TEXT = f"<think>\nlook\n</think>\n\nI shall search. {CALL}"
SEARCH = Tool.model_validate({"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}})


@dataclass
class ParserCalls:
    """Stand-in for vLLM's `DeltaMessage` and `ExtractedToolCallInformation`."""

    content: str | None = None
    reasoning: str | None = None
    tools_called: bool = False
    tool_calls: list[Any] = field(default_factory=list)


@dataclass
class Called:
    name: str
    arguments: str

    @property
    def function(self) -> Called:
        return self


class TagTools:
    """Tool parser with vLLM's interface, which returns content, then calls after a tag, and records its input."""

    def __init__(self) -> None:
        self.sent = 0
        self.fed: list[tuple[str, list[int]]] = []

    def extract_tool_calls_streaming(
        self, before: str, text: str, delta: str, ids_before: list[int], ids: list[int], delta_ids: list[int], _: object
    ) -> ParserCalls | None:
        assert before + delta == text
        assert [*ids_before, *delta_ids] == ids
        self.fed.append((delta, delta_ids))
        end = text.find("<tool_call>")
        content = text[self.sent : end if end >= 0 else len(text)]
        self.sent += len(content)
        return ParserCalls(content) if content else None

    def extract_tool_calls(self, text: str, _request: object) -> ParserCalls:
        content, _, rest = text.partition("<tool_call>")
        if not rest:
            return ParserCalls(text)
        call = json.loads(rest.removesuffix("</tool_call>"))
        return ParserCalls(content, None, True, [Called(call["name"], json.dumps(call["arguments"]))])


class TagReasoning:
    """Reasoning parser with vLLM's interface, which detects the end of reasoning by the id of the closing tag."""

    def __init__(self, tokenizer: Any) -> None:
        self.close = tokenizer.convert_tokens_to_ids("</think>")

    def extract_reasoning_streaming(
        self, _before: str, _text: str, delta: str, ids_before: list[int], _ids: list[int], delta_ids: list[int]
    ) -> ParserCalls | None:
        if self.close in ids_before:
            return ParserCalls(content=delta)
        if self.close in delta_ids:
            return None
        return ParserCalls(reasoning=delta.replace("<think>", ""))


def parsers_of(tools: list[TagTools] | None = None) -> Parsers:
    def reader(_context: ParserContext) -> VllmTools:
        def make() -> TagTools:
            parser = TagTools()
            if tools is not None:
                tools.append(parser)
            return parser

        return VllmTools(make, None)

    return Parsers(
        ToolParser(of_tokens=reader),
        ReasoningParser(of_tokens=lambda context: VllmReasoning(TagReasoning(context.tokenizer))),
    )


def answered(tokenizer: ChatTokenizer, syntax: AnswerSyntax, ids: Sequence[int], portion: int) -> tuple[Message, str]:
    """Return the message of an answer, and its content as it was streamed in pieces of `portion` tokens."""
    answer, content = AnswerParser(tokenizer, syntax), ""
    for at in range(0, len(ids), portion):
        content += answer.feed(ids[at : at + portion]).content
    answer.end()
    return answer.message, content


def meaning_of(message: Message) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.reasoning_content, message.text, calls


@pytest.mark.parametrize("portion", [1, 3, 1000])
def test_whole_answers_and_streams_read_the_same(tokenizer: ChatTokenizer, portion: int) -> None:
    seen: list[TagTools] = []
    syntax = AnswerSyntax.of(
        "", parsers_of(seen), tools=True, context=ParserContext(tokenizer.transformers_tokenizer, [SEARCH])
    )
    ids = [*tokenizer.encode(TEXT), tokenizer.eos_id or 0]
    message, content = answered(tokenizer, syntax, ids, portion)
    assert meaning_of(message) == ("\nlook\n", "\n\nI shall search. ", [("search", '{"query": "a"}')])
    assert content == "\n\nI shall search. ", "streamed before the call was read"
    assert sum(map(len, (ids for _, ids in seen[0].fed))) > 10
    assert all(len(delta_ids) >= 1 for _, delta_ids in seen[0].fed), "no text without its tokens"


def test_special_tokens_are_text_for_them_and_the_end_is_not(tokenizer: ChatTokenizer) -> None:
    seen: list[TagTools] = []
    syntax = AnswerSyntax.of(
        "",
        replace(parsers_of(seen), reasoning=Parsers().reasoning),
        tools=True,
        context=ParserContext(tokenizer.transformers_tokenizer),
    )
    answered(tokenizer, syntax, [*tokenizer.encode(CALL), tokenizer.eos_id or 0], 1)
    fed = "".join(text for text, _ in seen[0].fed)
    assert fed == CALL


def test_a_parser_that_stumbles_loses_nothing(tokenizer: ChatTokenizer) -> None:
    class Stumbles(TagTools):
        def extract_tool_calls(self, text: str, _request: object) -> ParserCalls:
            raise IndexError(text)

    syntax = replace(
        AnswerSyntax.of("", parsers_of(), tools=True, context=ParserContext(tokenizer.transformers_tokenizer)),
        tools=ToolParser(of_tokens=lambda _context: VllmTools(Stumbles, None)),
        reasoning=Parsers().reasoning,
    )
    message, content = answered(tokenizer, syntax, tokenizer.encode(f"Well. {CALL}"), 1)
    assert content == "Well. "
    assert meaning_of(message) == (None, f"Well. {CALL}", []), "what was held back is text"


def test_a_stop_string_does_not_part_text_from_its_tokens(tokenizer: ChatTokenizer) -> None:
    seen: list[TagTools] = []
    parsers_ = replace(parsers_of(seen), reasoning=Parsers().reasoning)
    syntax = AnswerSyntax.of(
        "", parsers_, tools=True, stops=("searching",), context=ParserContext(tokenizer.transformers_tokenizer)
    )
    ids = tokenizer.encode("I shall search. Then searching more")
    message, _ = answered(tokenizer, syntax, ids, 1)
    assert message.text == "I shall search. Then "
    assert all(delta_ids for _, delta_ids in seen[0].fed)


def test_a_conversation_goes_on_with_its_own_tokens(tokenizer: ChatTokenizer) -> None:
    """The client sends the call back with different whitespace, and the parser treats both as equal."""
    tag_parsers = replace(parsers_of(), reasoning=Parsers().reasoning)
    prompts = ExactPrompts(10_000, tag_parsers)
    question = Message(role="user", content="What is new?")
    prompt = prompts.build(tokenizer, [question], [SEARCH], {})
    syntax = AnswerSyntax.of(
        prompt.text, tag_parsers, tools=True, context=ParserContext(tokenizer.transformers_tokenizer, [SEARCH])
    )
    sampled = [
        *tokenizer.encode('<tool_call>\n{"name": "search", "arguments": {"query":  "a"}}\n</tool_call>'),
        tokenizer.eos_id or 0,
    ]
    message, _ = answered(tokenizer, syntax, sampled, 1)
    assert message.tool_calls is not None
    prompts.remember(prompt, message, sampled)
    result = Message(role="tool", content="nothing", tool_call_id=message.tool_calls[0].id)
    again = prompts.build(tokenizer, [question, message, result], [SEARCH], {})
    assert again.token_ids[: len(prompt.token_ids) + len(sampled)] == [*prompt.token_ids, *sampled]


@pytest.mark.parametrize("registry", [TOOL_PARSERS, REASONING_PARSERS])
def test_a_family_without_its_package_says_what_to_install(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "find_spec", lambda _name: None)
    with pytest.raises(PluginError, match=r"parser 'vllm:hermes' needs the package vllm.*make install GROUP=vllm"):
        registry.get("vllm:hermes")


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(
        PluginError, match="no installed package announces the family of tool parsers 'vlm'; did you mean"
    ):
        TOOL_PARSERS.get("vlm:hermes")


def test_an_unknown_member_is_named_with_all_that_there_are() -> None:
    with pytest.raises(PluginError, match="vLLM has no tool parser 'herms'; there are a, b"):
        parsers._member("tool", "herms", lambda _name: None, lambda: ["b", "a"])
