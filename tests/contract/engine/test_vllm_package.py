"""Parts of the package vLLM that we use, without a started engine: its parsers, parameters and arguments."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headrace_inference.chat.answer import Answer, Reading
from headrace_inference.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, ParserContext, Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.vllm_engine import library
from headrace_inference.vllm_engine.core import Request
from headrace_inference.vllm_engine.library import VllmLibrary
from headrace_inference.vllm_engine.settings import VllmSettings
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
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
        for name in ("search", "read")
    ]
    answer = Answer(tokenizer, Reading.of("", parsers, tools=True, context=ParserContext(tokenizer.outer, tools)))
    answer.feed([*tokenizer.encode(text), tokenizer.eos_id or 0])
    answer.end()
    complete_answer = answer.total
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in complete_answer.calls]
    return complete_answer.reasoning.strip(), complete_answer.content.strip(), calls


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_vllm_hermes_finds_what_ours_finds(tokenizer: ChatTokenizer, text: str) -> None:
    vllm_parsers = Parsers(TOOL_PARSERS.get("vllm:hermes"))
    vllm_parsers.check()
    assert read(tokenizer, vllm_parsers, text) == read(tokenizer, Parsers(TOOL_PARSERS.get("hermes")), text)


def test_vllm_reasoning_is_taken_off_the_front(tokenizer: ChatTokenizer) -> None:
    vllm_parsers = Parsers(TOOL_PARSERS.get("vllm:hermes"), REASONING_PARSERS.get("vllm:deepseek_r1"))
    vllm_parsers.check()
    message = read(tokenizer, vllm_parsers, f"<think>let me look</think>I look. {ONE}")
    assert message == ("let me look", "I look.", [("search", {"query": "a  b", "limit": 3})])


@pytest.mark.parametrize("registry", [TOOL_PARSERS, REASONING_PARSERS], ids=["tools", "reasoning"])
def test_vllm_parsers_that_are_not_there_are_named_with_those_that_are(registry: Any) -> None:
    presence.need("vllm")
    parser = registry.get("vllm:no_such_parser")
    with pytest.raises(PluginError, match=r"has no .* parser 'no_such_parser'; there are .*deepseek_r1|hermes"):
        parser.check()


def test_vllm_takes_what_a_choice_asks_for() -> None:
    presence.need("vllm")
    library = VllmLibrary(VllmSettings())
    request = Request(
        max_tokens=7, delta=True, temperature=0.7, seed=3, stop_token_ids=(5,), logprobs=2, logit_bias={4: -1.5}
    )
    parameters: Any = library.parameters(request)
    assert (parameters.max_tokens, parameters.temperature, parameters.seed, parameters.logprobs) == (7, 0.7, 3, 2)
    assert (parameters.stop_token_ids, parameters.logit_bias, parameters.ignore_eos, parameters.detokenize) == (
        [5],
        {4: -1.5},
        True,
        False,
    )
    assert parameters.output_kind.name == "DELTA"
    probe: Any = library.parameters(Request(max_tokens=1, delta=False, logprobs=1, logprob_token_ids=(9,)))
    assert (probe.logprob_token_ids, probe.num_logprobs, probe.output_kind.name) == ([9], 1, "FINAL_ONLY")


def test_vllm_takes_an_adapter_under_a_number(tmp_path: Path) -> None:
    presence.need("vllm")
    adapter: Any = VllmLibrary(VllmSettings()).adapter("tiny@0123456789abcdef", 4, tmp_path)
    assert (adapter.lora_name, adapter.lora_int_id, adapter.lora_path) == ("tiny@0123456789abcdef", 4, str(tmp_path))
    assert not adapter.load_inplace, "it would be read again and again"


@pytest.mark.parametrize("cpu", [True, False])
def test_vllm_knows_every_argument(
    tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory, cpu: bool
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    folder = build(tmp_path_factory.mktemp("arguments")).first.folder
    arguments = library.arguments(VllmSettings(adapter_rank_max=9), folder, cpu=cpu)
    assert arguments.keys() <= {field.name for field in fields(AsyncEngineArgs)}
