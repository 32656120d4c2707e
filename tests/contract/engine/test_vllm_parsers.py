"""vLLM's own parsers behind our registries: they find what ours find. No engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_inference.chat.answer import Answer, Reading
from headrace_inference.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, Asked, Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_runtime.registries import PluginError
from headrace_schemas import Tool
from tests.contract.engine.ground import build
from tests.support import presence

ONE = '<tool_call>{"name": "search", "arguments": {"query": "a  b", "limit": 3}}</tool_call>'
TWO = '<tool_call>\n{"name": "read", "arguments": {"id": 7}}\n</tool_call>'
ANSWERS = {
    "text alone": "Nothing to do here.",
    "a call": f"I look. {ONE}",
    "two calls": f"{ONE}\n{TWO}",
    "half a call": 'Well <tool_call>{"name": "sea',
    "no call": "1 < 2 and <tool is no tag",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    presence.need("vllm")
    first = build(tmp_path_factory.mktemp("parsers")).first
    return ChatTokenizer(first.folder, first.manifest)


def read(tokenizer: ChatTokenizer, parsers: Parsers, text: str) -> tuple[str, str, list[tuple[str, object]]]:
    import json

    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
        for name in ("search", "read")
    ]
    answer = Answer(tokenizer, Reading.of("", parsers, tools=True, asked=Asked(tokenizer.outer, tools)))
    answer.feed([*tokenizer.encode(text), tokenizer.eos_id or 0])
    answer.end()
    whole = answer.whole
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in whole.calls]
    return whole.reasoning.strip(), whole.content.strip(), calls


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_vllm_hermes_finds_what_ours_finds(tokenizer: ChatTokenizer, text: str) -> None:
    theirs = Parsers(TOOL_PARSERS.get("vllm:hermes"))
    theirs.check()
    assert read(tokenizer, theirs, text) == read(tokenizer, Parsers(TOOL_PARSERS.get("hermes")), text)


def test_vllm_reasoning_is_taken_off_the_front(tokenizer: ChatTokenizer) -> None:
    theirs = Parsers(TOOL_PARSERS.get("vllm:hermes"), REASONING_PARSERS.get("vllm:deepseek_r1"))
    theirs.check()
    found = read(tokenizer, theirs, f"<think>let me look</think>I look. {ONE}")
    assert found == ("let me look", "I look.", [("search", {"query": "a  b", "limit": 3})])


@pytest.mark.parametrize("registry", [TOOL_PARSERS, REASONING_PARSERS], ids=["tools", "reasoning"])
def test_vllm_parsers_that_are_not_there_are_named_with_those_that_are(registry: object, tmp_path: Path) -> None:
    presence.need("vllm")
    parser = registry.get("vllm:no_such_parser")  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"has no .* parser 'no_such_parser'; there are .*deepseek_r1|hermes"):
        parser.check()
