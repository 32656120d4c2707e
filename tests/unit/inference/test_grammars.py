"""Tests of constrained answers of the real engine: each token is allowed, and unconstrained rows are unchanged."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
import torch

from headrace_gateway.apis.responses_api.grammars import pattern_of
from headrace_inference.chat.parsers import NO_TOOLS, Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.engine import Start
from headrace_inference.grammar.compiler import CompiledGrammar, GrammarCompiler
from headrace_inference.grammar.forms import AnswerForm, grammar_of, required_form
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.errors import Refused
from headrace_schemas import Tool
from headrace_schemas.http.answer_form import NamedFunction, NamedTool, ResponseFormat
from tests.support.gateway import lenient
from tests.unit.gateway.test_grammars import APPLY_PATCH, chat_tools, grammar
from tests.unit.inference.conftest import (
    FULL,
    VERSION,
    Json,
    Models,
    ScriptedEngine,
    client,
    joined,
    prompt_of,
    sample,
)

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["glad", "sad"]},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "sure": {"type": "boolean"},
    },
    "required": ["mood", "marks", "sure"],
    "additionalProperties": False,
}
TOOL = Tool.model_validate(
    {"function": {"name": "mark", "parameters": {"$ref": "#/$defs/P", "$defs": {"P": SCHEMA}, "type": "object"}}}
)
OTHER = Tool.model_validate({"function": {"name": 'say "it"', "parameters": {"properties": {"n": {"const": 1}}}}})


def json_form(schema: Mapping[str, Any] = SCHEMA) -> AnswerForm:
    return AnswerForm(dict(schema))


async def compile_form(
    grammars: GrammarCompiler,
    tokenizer: ChatTokenizer,
    form: AnswerForm,
    *resumed: list[int],
    opened: bool = False,
    tenant: str = "",
) -> CompiledGrammar:
    return await grammars.compile(form, tokenizer, 320, resumed or ([],), opened=opened, tenant=tenant)


async def answer(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammar: CompiledGrammar, **how: Any
) -> tuple[str, Any]:
    start = Start(guide=grammar.guides[0], resumed=how.pop("resumed", ()))
    options = {"max_tokens": 400, "stop_ids": tokenizer.stop_ids, "grammar": grammar.record.text, **how}
    tokens = await sample(engine, prompt_of(12), models.first.version, start=start, **options)
    return tokenizer.text_of([*start.resumed, *tokens.token_ids]), tokens


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.0}, {"top_k": 3}, {"presence_penalty": 1.5}, {"temperature": 2.0}]
)
async def test_json_is_what_the_schema_says(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler, how: Json
) -> None:
    for seed in range(3):
        text, tokens = await answer(
            engine, models, tokenizer, await compile_form(grammars, tokenizer, json_form()), seed=seed, **how
        )
        assert tokens.finish == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
        assert len(tokens.logprobs) == len(tokens.token_ids)
        assert all(-50 < logprob <= 0 for logprob in tokens.logprobs)


async def test_logprobs_are_of_the_distribution_that_was_sampled(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> None:
    """Compare with the softmax over the model's logits after forbidden tokens are masked."""
    from transformers import AutoModelForCausalLM

    grammar = await compile_form(grammars, tokenizer, json_form())
    again = await compile_form(grammars, tokenizer, json_form())
    _, tokens = await answer(engine, models, tokenizer, grammar, seed=7, temperature=1.3)
    model = AutoModelForCausalLM.from_pretrained(models.first.folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt_of(12), *tokens.token_ids]])).logits[0, 11:-1] / 1.3
    narrowed = 0
    for logits_V, token, logprob in zip(logits_TV, tokens.token_ids, tokens.logprobs, strict=True):
        words = again.guides[0].allowed()
        bits = [number for number in range(320) if words[number // 32] >> (number % 32) & 1]
        assert token in bits
        expected = logits_V[token] - logits_V[bits].logsumexp(0)
        assert logprob == pytest.approx(float(expected), abs=1e-4)
        narrowed += len(bits) < 320
        again.guides[0].accept(token)
    assert narrowed == len(tokens.token_ids), "a grammar of JSON allows all tokens nowhere"


async def test_others_in_the_batch_are_as_they_were(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> None:
    alone = await sample(engine, prompt_of(30), models.first.version, seed=3, top_logprobs=2)
    compiled_grammars = [await compile_form(grammars, tokenizer, json_form()) for _ in range(4)]
    beside = [asyncio.create_task(answer(engine, models, tokenizer, item, seed=9)) for item in compiled_grammars]
    again = await sample(engine, prompt_of(30), models.first.version, seed=3, top_logprobs=2)
    texts = {(await item)[0] for item in beside}
    assert again.token_ids == alone.token_ids
    assert len(texts) == 1, "equal seeds, equal answers"


async def test_a_resumed_answer_goes_on_in_its_grammar(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> None:
    complete, tokens = await answer(
        engine, models, tokenizer, await compile_form(grammars, tokenizer, json_form()), seed=11
    )
    for cut in (1, len(tokens.token_ids) // 2, len(tokens.token_ids) - 1):
        begun = tokens.token_ids[:cut]
        grammar = await compile_form(grammars, tokenizer, json_form(), begun)
        text, rest = await answer(engine, models, tokenizer, grammar, seed=11, resumed=begun)
        assert (text, rest.token_ids) == (complete, tokens.token_ids[cut:])
    with pytest.raises(Refused, match="headrace_resume"):
        await compile_form(grammars, tokenizer, json_form(), tokenizer.encode("no JSON"))


async def test_a_sequence_that_was_set_back_keeps_its_place(
    make_engine: Any, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> None:
    """The KV memory has room for two of four long rows, so that rows are paused and computed again."""
    engine = await make_engine(kv_mib_max=1, sequences_max=4)
    schema = {"type": "array", "items": {"enum": ["on", "off"]}, "minItems": 120, "maxItems": 120}
    compiled_grammars = [await compile_form(grammars, tokenizer, json_form(schema)) for _ in range(4)]
    answers = [
        answer(engine, models, tokenizer, grammar, seed=seed, max_tokens=900)
        for seed, grammar in enumerate(compiled_grammars)
    ]
    for text, tokens in await asyncio.gather(*answers):
        assert tokens.finish == "stop"
        assert len(json.loads(text)) == 120


def calls_in(text: str) -> list[Json]:
    reader = HERMES.make()  # type: ignore[misc]
    parsed_calls = [*reader.feed(text).calls, *reader.end().calls]
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed_calls]


async def test_forced_calls_are_read_as_calls(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> None:
    named = NamedTool(type="function", function=NamedFunction(name='say "it"'))
    whole: Counter[int] = Counter()
    cases = ((0, "required", True), (1, "required", False), (2, named, True))
    for (case, choice, several), seed in itertools.product(cases, range(4)):
        form = required_form(None, choice, (TOOL, OTHER), several=several)  # type: ignore[arg-type]
        assert form is not None
        text, tokens = await answer(engine, models, tokenizer, await compile_form(grammars, tokenizer, form), seed=seed)
        calls = calls_in(text)
        whole[case] += bool(calls)
        assert calls or tokens.finish == "length", text
        for call in calls:
            if call["name"] == "mark":
                jsonschema.validate(call["arguments"], SCHEMA)
            else:
                assert call["name"] == 'say "it"'
        if tokens.finish == "stop" and (not several or choice is named):
            assert len(calls) == 1
        if choice is named:
            assert {call["name"] for call in calls} <= {'say "it"'}
    assert min(whole[case] for case, _, _ in cases) >= 1


@pytest.mark.parametrize(
    ("definition", "syntax"),
    [
        (APPLY_PATCH, "lark"),
        ('start: /[a-c"\\\\]+/ LF "\\"é\\""\n%import common.LF', "lark"),
        (r"\d{2}-[A-F]+\n", "regex"),
    ],
)
async def test_a_forced_custom_tool_is_held_to_its_grammar(
    engine: TorchEngine,
    models: Models,
    tokenizer: ChatTokenizer,
    grammars: GrammarCompiler,
    definition: str,
    syntax: str,
) -> None:
    text_format = grammar(definition, syntax)
    tools = chat_tools(lenient(), text_format, "required")
    pattern = pattern_of(text_format)
    form = required_form(None, "required", tools, several=False)
    assert form is not None
    assert pattern is not None
    compiled = await compile_form(grammars, tokenizer, form)
    text, tokens = await answer(engine, models, tokenizer, compiled, seed=1, max_tokens=600)
    if tokens.finish == "length":
        assert definition == APPLY_PATCH, "the other texts end by chance"
        assert r'"input": "*** Begin Patch\n*** ' in text
    else:
        (call,) = calls_in(text)
        assert re.search(pattern[:-1] + r"\Z", call["arguments"]["input"]), text


def test_grammars_as_text() -> None:
    """The grammar includes reasoning if the template supports it, and tags as single tokens if the tokenizer has
    them."""

    def text(form: AnswerForm, **how: Any) -> str:
        special = {"<think>": 7, "</think>": 8, "<tool_call>": 3}.get if how.pop("apart", False) else lambda _text: None
        return grammar_of(form, Parsers(HERMES, THINK), special, **{"thinks": False, "opened": False, **how})

    plain = AnswerForm({"type": "object"})
    assert "start: answer\n" in text(plain)
    assert 'start: ("<think>" thought)? answer\n' in text(plain, thinks=True)
    assert "start: thought answer\n" in text(plain, opened=True)
    assert "until_closed[lazy]: /(?s:.*)<\\/think>/" in text(plain, opened=True)
    assert "start: (<[7]> thought)? answer\n" in text(plain, thinks=True, apart=True)
    forced = AnswerForm(None, (TOOL,), forced=True, several=False)
    assert 'call_0: <[3]> "\\n"? "{\\"name\\": \\"mark\\", \\"arguments\\": " arguments_0' in text(forced, apart=True)
    assert "answer: json | calls\n" in text(AnswerForm({"type": "object"}, (TOOL,)))
    either = AnswerForm({"type": "object"}, (TOOL, OTHER))
    assert "calls: (<[3]>) <[*]>*\n" in text(either, apart=True), "the model decides what it calls"
    assert "arguments_0" in text(either), "without a token that opens calls, they are held"
    assert "arguments_0" in text(AnswerForm({"type": "object"}, (TOOL,), several=False), apart=True)
    with pytest.raises(Refused, match="tool_choice"):
        grammar_of(forced, Parsers(NO_TOOLS, THINK), lambda _text: None, thinks=False, opened=False)


def tag(tokenizer: ChatTokenizer, text: str) -> int:
    token_id = tokenizer.token_id(text)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning_comes_before_what_is_held(
    tokenizer: ChatTokenizer, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarCompiler(Parsers(HERMES, THINK))
    monkeypatch.setattr(type(tokenizer), "template", "{{ '<think>' }}")
    grammar = await compile_form(grammars, tokenizer, json_form(), opened=opened)
    begin = [] if opened else [tag(tokenizer, "<think>")]
    sampled = [
        *begin,
        *tokenizer.encode("so { it is"),
        tag(tokenizer, "</think>"),
        *tokenizer.encode('\n\n{"mood": "glad"'),
    ]
    assert grammar.guides[0].replay(sampled)
    closed = await compile_form(grammars, tokenizer, json_form(), opened=opened)
    assert closed.guides[0].replay(tokenizer.encode('{"mood": "glad"')) or opened
    assert not closed.guides[0].replay([tag(tokenizer, "</think>")]) or opened
    grammars.close()


async def test_calls_beside_a_typed_answer_are_free_after_their_first_token(
    tokenizer: ChatTokenizer, grammars: GrammarCompiler
) -> None:
    form = required_form(ResponseFormat(type="json_object"), "auto", (TOOL,), several=True)
    assert form is not None
    (guide,) = (await compile_form(grammars, tokenizer, form)).guides
    opening = tag(tokenizer, "<tool_call>")
    assert guide.allowed()[opening // 32] >> opening % 32 & 1
    assert np.bitwise_count(guide.allowed().view(np.uint32)).sum() < 10, "an object, or a call"
    for token in (opening, *tokenizer.encode("any } text"), tag(tokenizer, "</tool_call>")):
        guide.accept(token)
        assert np.bitwise_count(guide.allowed().view(np.uint32)).sum() == 320
    assert not guide.error


REFUSED: list[tuple[Json, str, str]] = [
    ({"not": {"type": "string"}}, "unsupported_schema", "Unimplemented keys"),
    ({"type": "objekt"}, "unsupported_schema", "Invalid type"),
    ({"$ref": "http://example.test/s"}, "unsupported_schema", "Resource"),
    ({"$ref": "#"}, "unsupported_schema", "more work for one token"),
    ({"type": "string", "pattern": "(?=a)b"}, "unsupported_schema", "look-around"),
    (
        {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
        "unsupported_schema",
        "Unsat",
    ),
    ({"enum": ["x" * 1000] * 100}, "schema_too_large", "65536 bytes"),
    ({"const": "x" * 1025}, "schema_too_large", "1024 characters"),
    ({"enum": [{"a": ["x" * 1025]}]}, "schema_too_large", "1024 characters"),
    ({"properties": {"x" * 1025: {}}}, "schema_too_large", "1024 characters"),
    ({"items": {"pattern": "x" * 1025}}, "schema_too_large", "1024 characters"),
    (json.loads('{"items":' * 60 + "{}" + "}" * 60), "schema_too_large", "deeper than 48"),
]


async def test_a_form_beyond_the_limit_of_a_step_says_so(grammars: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    expensive = {"type": "string", "pattern": f"^{'(a?){30}' * 30}a{{900}}$"}
    (guide,) = (await compile_form(grammars, tokenizer, json_form(expensive))).guides
    for _ in range(4):
        mask = guide.allowed()
        guide.accept(next((token for token in range(320) if mask[token // 32] >> (token % 32) & 1), 0))
    assert guide.error == "the grammar needs more work for one token than the library allows"


@pytest.mark.parametrize(("schema", "code", "words"), REFUSED)
async def test_what_cannot_be_held_is_refused_by_name(
    tokenizer: ChatTokenizer, grammars: GrammarCompiler, schema: Json, code: str, words: str
) -> None:
    with pytest.raises(Refused, match=words) as refused:
        await compile_form(grammars, tokenizer, json_form(schema))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, "response_format")
    assert "1 |" not in str(refused.value), "our own grammar is nobody's business"


async def test_a_long_description_is_no_text_of_the_answer(grammars: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    described = {"type": "object", "description": "x" * 2000, "properties": {"enum": {"title": "x" * 2000}}}
    assert (await compile_form(grammars, tokenizer, json_form(described))).record.text


async def test_a_grammar_is_compiled_once(
    tokenizer: ChatTokenizer, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compile_form(grammars, tokenizer, json_form())
    monkeypatch.setattr(grammars, "_guide", None)
    first = await compile_form(grammars, tokenizer, json_form())
    two = await compile_form(grammars, tokenizer, json_form(), [], [])
    assert len({id(guide) for guide in (*first.guides, *two.guides)}) == 3, "each choice has its own"


async def ask_real(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": VERSION, "messages": [{"role": "user", "content": "hi"}], "seed": 4, **fields}
    return await http.post("/v1/chat/completions", json=body)


class RealEngine(ScriptedEngine):
    """The scripted engine of the HTTP tests, but with answers of the real engine."""

    reports_sets = True

    def __init__(self, tokenizer: ChatTokenizer, engine: TorchEngine, version: str) -> None:
        super().__init__(tokenizer)
        self._real, self._version = engine, version

    def generate(self, prompt: Any, sampling: Any, version: str, starts: Any, **how: Any) -> Any:
        return self._real.generate(prompt, sampling, self._version, starts, **how)


FORMAT = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA, "strict": True}}


async def test_over_http(engine: TorchEngine, models: Models, tokenizer: ChatTokenizer) -> None:
    async with client(RealEngine(tokenizer, engine, models.first.version), tokenizer) as http:
        several = (await ask_real(http, response_format=FORMAT, n=3, **FULL)).json()
        for choice in several["choices"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert choice["finish_reason"] == "stop"
        streamed = await ask_real(http, response_format=FORMAT, stream=True, **FULL)
        chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert joined(chunks)["content"] == several["choices"][0]["message"]["content"]
        cut = (await ask_real(http, response_format=FORMAT, max_tokens=4)).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        stopped = (await ask_real(http, response_format=FORMAT, stop=["mo"])).json()["choices"][0]
        assert (stopped["finish_reason"], stopped["message"]["content"]) == ("stop", '{"')
        tools = [TOOL.model_dump(mode="json", exclude_none=True)]
        choice = {"type": "function", "function": {"name": "mark"}}
        called = (await ask_real(http, tools=tools, tool_choice=choice)).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls"
        (call,) = called["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        resume = {
            "choices": [{"index": 0, "token_ids": several["choices"][0]["token_ids"][:5], "logprobs": [-1.0] * 5}]
        }
        rest = await ask_real(http, response_format=FORMAT, stream=True, headrace_resume=resume, **FULL)
        chunks = [json.loads(line[6:]) for line in rest.text.split("\n\n") if line.startswith("data: {")]
        assert joined(chunks)["token_ids"] == several["choices"][0]["token_ids"][5:]
