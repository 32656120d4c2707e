"""Schemas with keywords that no grammar can hold, as pydantic writes them for ordinary types."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher
from pydantic import AnyUrl, Base64Bytes, BaseModel, Field, FilePath, Json, SecretStr, create_model

from headrace_gateway.refusals import ApiError
from headrace_gateway.request_context import RequestContext
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.forms import form_of
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.errors import Refused
from headrace_schemas.http.answer_form import UNHELD_KEYWORDS, ResponseFormat, unheld_keywords
from tests.support.requests import lenient, strict
from tests.unit.gateway.test_hidden_fields import USER, parsed
from tests.unit.inference.conftest import Models
from tests.unit.inference.test_grammars import answer, compile_form


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
    """Return a schema in which `keyword` stands below a property of the same name."""
    values = {"dependentRequired": {}, "dependentSchemas": {}, "maxContains": 1, "minContains": 1, "uniqueItems": True}
    value = values.get(keyword, {"maxLength": 3})
    return {"type": "object", "properties": {keyword: {"anyOf": [{"type": "null"}, {keyword: value}]}}}


@pytest.mark.parametrize("kind", TYPES, ids=str)
async def test_types_of_pydantic_are_held_as_far_as_a_grammar_can(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer, grammars: GrammarCompiler, kind: Any
) -> None:
    model: type[BaseModel] = create_model("Answer", value=(kind, ...))
    form = form_of(ResponseFormat.model_validate(format_of(model.model_json_schema())), None, (), several=True)
    assert form is not None
    compiled = await compile_form(grammars, tokenizer, form)
    text, tokens = await answer(engine, models, tokenizer, compiled, max_tokens=200)
    if tokens.finish == "stop":
        assert next(iter(json.loads(text))) == "value"


@pytest.mark.parametrize("keyword", sorted(UNHELD_KEYWORDS))
def test_each_unheld_keyword_is_one_that_the_library_leaves_out(keyword: str) -> None:
    schema = keyword_schema(keyword)
    assert unheld_keywords(schema) == {keyword}
    for is_lenient in (False, True):
        text = json.dumps(schema | {"x-guidance": {"lenient": is_lenient}})
        failed, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text))
        assert (failed, keyword in "".join(messages)) == (not is_lenient, True)


def test_names_and_values_are_not_taken_for_keywords() -> None:
    schema: dict[str, Any] = {
        "properties": {"not": {"enum": [{"if": 1}]}, "if": {"default": {"then": 1}}},
        "$defs": {"contains": {}},
    }
    assert unheld_keywords(schema) == set()


@pytest.mark.parametrize("fields", [{}, {"strict": False}, {"strict": True}], ids=str)
async def test_strict_refuses_what_a_lenient_schema_reports(
    tokenizer: ChatTokenizer, grammars: GrammarCompiler, fields: dict[str, Any]
) -> None:
    response_format = format_of(keyword_schema("uniqueItems"), **fields)
    context = lenient()
    request = parsed(context, response_format=response_format)
    form = form_of(request.response_format, None, (), several=True)
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
