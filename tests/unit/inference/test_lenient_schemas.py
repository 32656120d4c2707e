"""Tests of JSON schemas with keywords that no grammar supports, and of slow grammars.

pydantic writes such keywords for ordinary types. A grammar that compiles too slowly fails alone, and tenants take
turns.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import threading
import time
import uuid
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher
from pydantic import AnyUrl, Base64Bytes, BaseModel, Field, FilePath, Json, SecretStr, create_model

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.request_context import RequestContext
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.errors import Overloaded
from headrace_inference.grammar import compiler
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.fair_slots import FairSlots
from headrace_inference.grammar.forms import AnswerForm, required_form
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.errors import Refused
from headrace_runtime.grammars.trial import GrammarTrial, TrialFailed
from headrace_runtime.grammars.vocabulary import GrammarGuide
from headrace_schemas.http.answer_form import UNENFORCED_KEYWORDS, ResponseFormat, unenforced_keywords
from tests.support.gateway import lenient, strict
from tests.unit.gateway.test_hidden_fields import USER, parsed
from tests.unit.inference.conftest import Json as JsonObject
from tests.unit.inference.conftest import Models
from tests.unit.inference.test_grammars import answer, compile_form, json_form


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Call(BaseModel):
    kind: Literal["call"]
    number: int


class Mail(BaseModel):
    kind: Literal["mail"]
    address: str


TYPES: tuple[Any, ...] = (
    set[str], frozenset[int], dict[Colour, int], pathlib.Path, FilePath, bytes, Base64Bytes, SecretStr, re.Pattern[str],
    ipaddress.IPv4Network, Json[int], uuid.UUID, datetime.timedelta, datetime.datetime, decimal.Decimal, AnyUrl,
    tuple[int, str], list[Call] | None, Annotated[Call | Mail, Field(discriminator="kind")],
)  # fmt: skip


def format_of(schema: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def keyword_schema(keyword: str) -> dict[str, Any]:
    """Return a schema in which `keyword` is used below a property of the same name."""
    values = {"dependentRequired": {}, "dependentSchemas": {}, "maxContains": 1, "minContains": 1, "uniqueItems": True}
    value = values.get(keyword, {"maxLength": 3})
    return {"type": "object", "properties": {keyword: {"anyOf": [{"type": "null"}, {keyword: value}]}}}


@pytest.mark.parametrize("kind", TYPES, ids=str)
async def test_types_of_pydantic_are_held_as_far_as_a_grammar_can(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler, kind: Any
) -> None:
    model: type[BaseModel] = create_model("Answer", value=(kind, ...))
    form = required_form(ResponseFormat.model_validate(format_of(model.model_json_schema())), None, (), several=True)
    assert form is not None
    compiled = await compile_form(grammars, tokenizer, form)
    text, tokens = await answer(engine, models, tokenizer, compiled, max_tokens=200)
    if tokens.finish == "stop":
        assert next(iter(json.loads(text))) == "value"


@pytest.mark.parametrize("keyword", sorted(UNENFORCED_KEYWORDS))
def test_each_unheld_keyword_is_one_that_the_library_leaves_out(keyword: str) -> None:
    schema = keyword_schema(keyword)
    assert unenforced_keywords(schema) == {keyword}
    for is_lenient in (False, True):
        text = json.dumps(schema | {"x-guidance": {"lenient": is_lenient}})
        failed, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text))
        assert (failed, keyword in "".join(messages)) == (not is_lenient, True)


def test_names_and_values_are_not_taken_for_keywords() -> None:
    schema: dict[str, Any] = {
        "properties": {"not": {"enum": [{"if": 1}]}, "if": {"default": {"then": 1}}},
        "$defs": {"contains": {}},
    }
    assert unenforced_keywords(schema) == set()


@pytest.mark.parametrize("fields", [{}, {"strict": False}, {"strict": True}], ids=str)
async def test_strict_refuses_what_a_lenient_schema_reports(
    tokenizer: ChatTokenizer, grammars: GrammarCompiler, fields: dict[str, Any]
) -> None:
    response_format = format_of(keyword_schema("uniqueItems"), **fields)
    context = lenient()
    request = parsed(context, response_format=response_format)
    form = required_form(request.response_format, None, (), several=True)
    assert form is not None
    if fields.get("strict"):
        assert context.ignored == ()
        with pytest.raises(Refused, match="uniqueItems"):
            await compile_form(grammars, tokenizer, form)
        return
    assert context.ignored == ("response_format.uniqueItems",)
    assert (await compile_form(grammars, tokenizer, form)).guides
    with pytest.raises(ApiError, match="no grammar can hold"):
        parsed(strict(), response_format=response_format)


def test_arguments_of_a_forced_call_are_reported_like_a_typed_answer() -> None:
    def ignored(choice: str, *, is_strict: bool = False) -> tuple[str, ...]:
        context: RequestContext = lenient()
        function = {"name": "f", "parameters": keyword_schema("not"), "strict": is_strict}
        parsed(context, messages=[USER], tools=[{"type": "function", "function": function}], tool_choice=choice)
        return context.ignored

    assert ignored("required") == ("tools.not",)
    assert ignored("auto") == ignored("required", is_strict=True) == ()


async def test_a_slow_grammar_is_given_up_and_the_loop_goes_on(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(compiler, "WAITING_MAX", 1)
    grammars = GrammarCompiler(Parsers(HERMES, THINK))
    go_on = threading.Event()
    compiled = grammars._guide

    def slow(grammar: Any) -> GrammarGuide:
        go_on.wait(20)
        return compiled(grammar)

    monkeypatch.setattr(grammars, "_guide", slow)
    monkeypatch.setattr(grammars, "_try", lambda _grammar: None)
    first = asyncio.create_task(compile_form(grammars, tokenizer, json_form()))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(compile_form(grammars, tokenizer, json_form({"const": 2})))
    await asyncio.sleep(0.01)
    with pytest.raises(Refused, match="wait to be compiled") as overloaded:
        await compile_form(grammars, tokenizer, json_form({"const": 3}))
    assert overloaded.value.status == 503
    with pytest.raises(Refused, match=r"longer than 0\.1 s"):
        await first
    assert not second.done(), "it waits for a thread, which is not its fault"
    go_on.set()
    assert (await second).record.text
    grammars.close()


async def test_equal_grammars_of_a_tenant_share_one_compilation(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarCompiler(Parsers(HERMES, THINK))
    trials: list[str] = []
    monkeypatch.setattr(grammars, "_try", lambda grammar: trials.append(grammar.text))
    requests = [asyncio.create_task(compile_form(grammars, tokenizer, json_form())) for _ in range(100)]
    requests.append(asyncio.create_task(compile_form(grammars, tokenizer, json_form(), tenant="another")))
    await asyncio.sleep(0)
    requests.pop(0).cancel()
    answers = await asyncio.gather(*requests)
    assert len({compiled.record.text for compiled in answers}) == 1
    assert len(trials) == 2, "each tenant has compilations of its own"
    assert not grammars._compilations
    grammars.close()


async def test_large_schemas_of_a_tenant_do_not_hold_up_those_of_another(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema of 32,000 values takes 0.1 s to check and to write, before anything is compiled."""
    grammars = GrammarCompiler(Parsers(HERMES, THINK))
    written: list[AnswerForm] = []
    write = grammars._write

    def slow(form: AnswerForm, *others: Any) -> Any:
        time.sleep(0.02)
        written.append(form)
        return write(form, *others)

    monkeypatch.setattr(grammars, "_write", slow)
    monkeypatch.setattr(grammars, "_try", lambda _grammar: None)
    flood = [
        asyncio.create_task(compile_form(grammars, tokenizer, json_form({"const": number}), tenant="greedy"))
        for number in range(20)
    ]
    await asyncio.sleep(0)
    modest = json_form({"const": "modest"})
    assert (await compile_form(grammars, tokenizer, modest, tenant="modest")).record.text
    assert written.index(modest) <= 2
    assert all([(await task).record.text for task in flood])
    grammars.close()


SLOW_FACTORS: list[JsonObject] = [{"type": "integer", "multipleOf": factor} for factor in (9973, 9967)]
"""The library takes minutes to compile these together, and counts none of it as fuel."""


async def test_a_schema_that_takes_too_long_holds_no_thread(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 3.0)
    grammars = GrammarCompiler(Parsers(HERMES, THINK))
    slow = asyncio.create_task(compile_form(grammars, tokenizer, json_form({"allOf": SLOW_FACTORS}), tenant="greedy"))
    await asyncio.sleep(0.05)
    other_calls = [
        asyncio.create_task(compile_form(grammars, tokenizer, json_form({"const": number}), tenant=tenant))
        for number, tenant in enumerate(("greedy", "greedy", "modest"))
    ]
    with pytest.raises(Refused, match="takes longer than 3 s to compile"):
        await slow
    assert all([(await task).record.text for task in other_calls])
    grammars.close()


def test_a_trial_that_ends_its_process_fails_and_the_next_one_succeeds() -> None:
    trial = GrammarTrial()
    trial.run('start: "a"', 20.0)
    killing = threading.Timer(0.3, trial._ensure_running().kill)
    killing.start()
    with pytest.raises(TrialFailed):
        trial.run(f"start: %json {json.dumps({'allOf': SLOW_FACTORS})}", 20.0)
    killing.join()
    trial.run("not a grammar \0", 20.0)
    trial.run('start: "a"', 20.0)
    trial.stop()


async def test_owners_take_turns() -> None:
    slots: FairSlots[str] = FairSlots(slots=1, waiting_max=6)
    order: list[str] = []

    async def work(owner: str) -> None:
        await slots.acquire(owner)
        order.append(owner)
        await asyncio.sleep(0)
        slots.release()

    greedy = [asyncio.create_task(work("greedy")) for _ in range(5)]
    await asyncio.sleep(0)
    cancelled = asyncio.create_task(work("gone"))
    modest = [asyncio.create_task(work("modest")) for _ in range(2)]
    await asyncio.sleep(0)
    cancelled.cancel()
    refused = [asyncio.create_task(work("greedy")) for _ in range(2)]
    await asyncio.gather(*greedy, *modest)
    assert order == ["greedy", "greedy", "greedy", "modest", "greedy", "modest", "greedy"]
    for task in refused:
        with pytest.raises(Overloaded):
            await task
    assert (slots._free, dict(slots._queues)) == (1, {})
