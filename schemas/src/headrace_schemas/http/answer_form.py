"""Constraints of a chat request on the form of its answer: OpenAI's `response_format` and `tool_choice`.

The gateway and the replicas share this module. A replica enforces the constraints by a grammar: it never samples a
token that would violate them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from headrace_schemas.events.chat import Grammar, Message
from headrace_schemas.events.turn import Turn
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.bounds import JsonObject, check_json

RESPONSE_FORMAT, TOOL_CHOICE = "response_format", "tool_choice"
"""Request fields with constraints. A replica lists those that it supports in `Replica.grammars`."""

UNENFORCED_KEYWORDS = frozenset(
    ("contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not",
     "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems")
)  # fmt: skip
"""Keywords of JSON Schema that the grammar library, llguidance, cannot enforce."""
_SCHEMAS_BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_VALUES = frozenset(("const", "default", "enum", "example", "examples"))


class JsonSchemaFormat(Model):
    """The field `response_format.json_schema`. The schema is enforced also without `strict`.

    A schema with `UNENFORCED_KEYWORDS` or an unknown `format` is refused if `strict` is true; otherwise these keywords
    are ignored.
    """

    name: Text
    description: LongText | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be set if, and only if, type is 'json_schema'")
        check_json(self.recorded)  # an event records all of it, two levels above the schema
        return self

    @property
    def recorded(self) -> dict[str, JsonValue]:
        """The JSON of this format that an event records."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def constrains(self) -> bool:
        """Whether the format constrains the answer."""
        return self.type != "text"

    @property
    def strict(self) -> bool:
        """Whether to refuse a schema that the grammar library cannot enforce completely."""
        return self.json_schema is not None and self.json_schema.strict is True

    @property
    def required_schema(self) -> dict[str, JsonValue]:
        """The JSON Schema that the answer must satisfy."""
        return self.json_schema.schema_ if self.json_schema else {"type": "object"}


class NamedFunction(Model):
    """The name of the function that the answer must call."""

    name: Text


class NamedTool(Model):
    """The object form of the field `tool_choice`."""

    type: Literal["function"]
    function: NamedFunction


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")
    if isinstance(value, dict) and value.get("type") != "function":
        raise ValueError(f"type {str(value.get('type'))[:40]!r} is not supported; 'function' is")
    return value


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_choice)]
"""The field `tool_choice`."""


def requires_call(choice: ToolChoice) -> bool:
    """Return whether the answer must contain a tool call."""
    return choice == "required" or isinstance(choice, NamedTool)


def check_choice(choice: ToolChoice, tools: Collection[str]) -> None:
    """Check that the request offers the tools that its `tool_choice` requires.

    Args:
        choice: the field `tool_choice`.
        tools: the names of the tools that the request offers.

    Raises:
        ValueError: there are no tools, or the required function is none of them.
    """
    if choice == "required" and not tools:
        raise ValueError(f"{TOOL_CHOICE}: 'required' needs tools; add tools")
    if isinstance(choice, NamedTool) and choice.function.name not in tools:
        raise ValueError(f"{TOOL_CHOICE}: names a function that is not among the tools")


def constrained_fields(response_format: ResponseFormat | None, choice: ToolChoice) -> frozenset[str]:
    """Return which of the request fields `response_format` and `tool_choice` require a grammar for the answer."""
    constrains = {
        RESPONSE_FORMAT: response_format is not None and response_format.constrains,
        TOOL_CHOICE: requires_call(choice),
    }
    return frozenset(field for field, is_constrained in constrains.items() if is_constrained)


def unenforced_keywords(schema: JsonValue) -> set[str]:
    """Return the `UNENFORCED_KEYWORDS` that a JSON Schema uses, at any depth."""
    if isinstance(schema, list):
        return set().union(*map(unenforced_keywords, schema))
    if not isinstance(schema, dict):
        return set()
    unheld = UNENFORCED_KEYWORDS & schema.keys()
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            value = list(value.values())  # its keys are names of properties, not keywords
        if keyword not in _VALUES:
            unheld |= unenforced_keywords(value)
    return set(unheld)


def grammar_of(response_format: ResponseFormat | None, choice: ToolChoice) -> Grammar | None:
    """Return the grammar that the turn records, or None if the answer is not constrained."""
    fields = constrained_fields(response_format, choice)
    if not fields:
        return None
    function = choice.function.name if isinstance(choice, NamedTool) else None
    return Grammar(
        response_format=response_format.recorded if response_format and RESPONSE_FORMAT in fields else None,
        tool_choice=("function" if function else "required") if TOOL_CHOICE in fields else None,
        function=function,
    )


def constraint_fields(grammar: Grammar | None) -> dict[str, JsonValue]:
    """Return the request fields that constrain another answer in the same way as `grammar` constrained one."""
    fields: dict[str, JsonValue] = {}
    if grammar is not None and grammar.response_format is not None:
        fields[RESPONSE_FORMAT] = grammar.response_format
    if grammar is not None and grammar.tool_choice is not None:
        named_tool: dict[str, JsonValue] = {"type": "function", "function": {"name": grammar.function}}
        fields[TOOL_CHOICE] = grammar.tool_choice if grammar.function is None else named_tool
    return fields


def repeated_request(
    version: str, turn: Turn, messages: Sequence[Message], answer_tokens_max: int
) -> dict[str, JsonValue]:
    """Return a chat completion request that repeats the request of `turn` to `version` and gets a single answer.

    The seed is left out, so that the new answer is an independent sample.

    Args:
        version: the exact version that must answer.
        turn: the turn whose tools and sampling parameters are used.
        messages: the conversation.
        answer_tokens_max: maximum number of tokens of the answer. The turn's limit applies if it is smaller.
    """
    sampling = turn.sampling.model_dump(
        mode="json", exclude_none=True, exclude={"seed", "max_tokens", "stop", "grammar"}
    )
    body: dict[str, JsonValue] = {
        "model": version,
        "messages": [message.model_dump(mode="json", exclude_none=True) for message in messages],
        "max_tokens": min(turn.sampling.max_tokens or answer_tokens_max, answer_tokens_max),
        **sampling,
        **constraint_fields(turn.sampling.grammar),
    }
    if turn.sampling.stop:
        body["stop"] = list(turn.sampling.stop)
    if turn.tools:
        body["tools"] = [tool.model_dump(mode="json", exclude_none=True) for tool in turn.tools]
    return body
