"""What a chat request asks of an answer's form: OpenAI's `response_format` and `tool_choice`.

The gateway and the replicas read them alike. A grammar holds an answer to it: no token that leaves the form is sampled.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from headrace_schemas.base import LongText, Model, Text
from headrace_schemas.bounds import JsonObject, check_json
from headrace_schemas.events.chat import Grammar

RESPONSE_FORMAT, TOOL_CHOICE = "response_format", "tool_choice"
"""What a replica that can hold answers announces (`Replica.grammars`)."""


class JsonSchemaFormat(Model):
    """`response_format.json_schema`. `strict` changes nothing: an answer is always held to the schema."""

    name: Text
    description: LongText | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        check_json(self.recorded)  # an event records all of it, two levels above the schema
        return self

    @property
    def recorded(self) -> dict[str, JsonValue]:
        """The JSON that an event records of this format."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def holds(self) -> bool:
        """Whether it asks for more than text."""
        return self.type != "text"

    @property
    def held_to(self) -> dict[str, JsonValue]:
        """What the answer has to satisfy."""
        return self.json_schema.schema_ if self.json_schema else {"type": "object"}


class NamedFunction(Model):
    """The function that has to be called."""

    name: Text


class NamedTool(Model):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")
    if isinstance(value, dict) and value.get("type") != "function":
        raise ValueError(f"type {str(value.get('type'))[:40]!r} is not supported; 'function' is")
    return value


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_choice)]
"""`tool_choice`."""


def forced(choice: ToolChoice) -> bool:
    """Whether some call has to be made."""
    return choice == "required" or isinstance(choice, NamedTool)


def check_choice(choice: ToolChoice, tools: Collection[str]) -> None:
    """`tools` are the names of those on offer. Raises `ValueError` when the call that is asked for is none of them."""
    if choice == "required" and not tools:
        raise ValueError(f"{TOOL_CHOICE}: 'required' needs tools")
    if isinstance(choice, NamedTool) and choice.function.name not in tools:
        raise ValueError(f"{TOOL_CHOICE}: names a function that is not among the tools")


def needs(response_format: ResponseFormat | None, choice: ToolChoice) -> frozenset[str]:
    """Which fields ask for a grammar, as `Replica.grammars` names them."""
    asked = {
        RESPONSE_FORMAT: response_format is not None and response_format.holds,
        TOOL_CHOICE: forced(choice),
    }
    return frozenset(name for name, wanted in asked.items() if wanted)


def recorded(response_format: ResponseFormat | None, choice: ToolChoice) -> Grammar | None:
    """What an event says of it; None where nothing was held."""
    wanted = needs(response_format, choice)
    if not wanted:
        return None
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return Grammar(
        response_format=response_format.recorded if response_format and RESPONSE_FORMAT in wanted else None,
        tool_choice=("function" if named else "required") if TOOL_CHOICE in wanted else None,
        function=named,
    )


def asked_again(grammar: Grammar | None) -> dict[str, JsonValue]:
    """The fields of a request for another answer that is held as one was."""
    found: dict[str, JsonValue] = {}
    if grammar is not None and grammar.response_format is not None:
        found[RESPONSE_FORMAT] = grammar.response_format
    if grammar is not None and grammar.tool_choice is not None:
        named: dict[str, JsonValue] = {"type": "function", "function": {"name": grammar.function}}
        found[TOOL_CHOICE] = grammar.tool_choice if grammar.function is None else named
    return found
