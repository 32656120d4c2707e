"""Tools of a Responses request, and their translation into functions of a chat request.

A custom tool becomes a function with one text argument, `input`. The functions of a namespace get its name as a prefix.
The calls in an answer get the names of the request again. Tools that OpenAI's servers run are left out, and their names
are recorded as ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, JsonValue, Tag
from pydantic_core import from_json

from headrace_gateway.apis.responses_api.grammars import NotRegularError, pattern_of
from headrace_gateway.requests.chat_messages import is_non_empty
from headrace_gateway.requests.request_context import RequestContext
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.bounds import JsonObject
from headrace_schemas.values.text import printable

Json = dict[str, JsonValue]
_CUSTOM_PARAMETERS: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class FunctionTool(Model):
    """Tool of type `function`, whose arguments fit a JSON Schema."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: Text
    description: LongText | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class CustomTool(Model):
    """Tool of type `custom`, whose input is a text. A grammar of the text is added to the description for the model,
    and as a pattern to the schema of the argument, which replicas enforce for a forced call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"]
    name: Text
    description: LongText | None = None
    format: JsonObject | None = None


def _inner_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in ("function", "custom") else None


InnerTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")], Discriminator(_inner_kind)
]


class NamespaceTool(Model):
    """Group of tools with a common name prefix."""

    model_config = ConfigDict(extra="allow")

    type: Literal["namespace"]
    name: Text
    description: LongText | None = None
    tools: tuple[InnerTool, ...]


class ServerTool(Model):
    """Tool that OpenAI's servers run, or whose schema only OpenAI's models know. It is not offered to the model."""

    model_config = ConfigDict(extra="ignore")

    type: Text


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return kind if kind in ("function", "custom", "namespace") else "server"


RequestTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ServerTool, Tag("server")],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function or custom tool that the model may call, with its namespace."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        """Name of the tool's function in the chat request."""
        return chat_name(self.tool.name, self.namespace)

    def function(self) -> Json:
        """Return the definition of the tool as a function of the chat request."""
        function: Json = {"name": self.chat_name}
        if isinstance(self.tool, CustomTool):
            function |= {"description": _described(self.tool), "parameters": _parameters(self.tool)}
        else:
            fields = {"description", "parameters", "strict"}
            function |= self.tool.model_dump(mode="json", exclude_none=True, include=fields)
        return {"type": "function", "function": function}


class ToolSet:
    """The tools that one request offers, by their names in the chat request."""

    def __init__(self, tools: Iterable[RequestTool], context: RequestContext, *, is_forced: bool = False) -> None:
        """Read the tools. With `is_forced`, the answer must be a call, and replicas enforce the schema of its
        arguments."""
        self._is_forced = is_forced
        self.echoed: list[Json] = []
        """The tools as the response names them."""
        self._offered: dict[str, OfferedTool] = {}
        for tool in tools:
            self._add(tool, context)

    def functions(self, allowed: frozenset[str] | None = None) -> list[Json]:
        """Return the tools as functions of the chat request. If `allowed` is set, return only tools with these
        names."""
        tools = self._offered.values()
        return [tool.function() for tool in tools if allowed is None or {tool.tool.name, tool.chat_name} & allowed]

    def find(self, name: str | None) -> OfferedTool | None:
        """Return the tool whose chat name is `name`, or None."""
        return self._offered.get(name or "")

    def _add(self, tool: RequestTool, context: RequestContext) -> None:
        if isinstance(tool, ServerTool):
            context.ignore(f"tools.{tool.type}", "only functions and custom tools can be offered to a model")
            return
        self.echoed.append(tool.model_dump(mode="json", include=set(type(tool).model_fields)))
        inner = tool.tools if isinstance(tool, NamespaceTool) else (tool,)
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for offered in (OfferedTool(single, namespace) for single in inner):
            for name, value in (offered.tool.model_extra or {}).items():
                if is_non_empty(value) and value is not False:
                    context.ignore(f"tools.{name}")
            if isinstance(offered.tool, CustomTool):
                self._check_grammar(offered.tool, context)
            self._offered[offered.chat_name] = offered

    def _check_grammar(self, tool: CustomTool, context: RequestContext) -> None:
        """Record the grammar of a custom tool as ignored, unless replicas will enforce it for a call of the tool.

        Raises:
            ApiError: 400, as `RequestContext.ignore`.
        """
        try:
            pattern = pattern_of(tool.format)
        except NotRegularError as error:
            context.ignore("tools.format", f"the grammar of {printable(tool.name)} is only described ({error})")
            return
        if pattern is not None and not self._is_forced:
            context.ignore("tools.format", "a call is held to its grammar if tool_choice requires it")


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name that a tool has as a function of the chat request: `NAMESPACE__NAME`, or `NAME` without a
    namespace."""
    return f"{namespace}__{name}" if namespace else name


def custom_input(arguments: str) -> str:
    """Return the input text in the arguments of a custom tool's call. Arguments in another form are returned
    unchanged."""
    try:
        value = from_json(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _parameters(tool: CustomTool) -> Json:
    try:
        pattern = pattern_of(tool.format)
    except NotRegularError:
        pattern = None
    if pattern is None:
        return _CUSTOM_PARAMETERS
    return {**_CUSTOM_PARAMETERS, "properties": {"input": {"type": "string", "pattern": pattern}}}


def _described(tool: CustomTool) -> str:
    grammar = tool.format or {}
    parts = [tool.description or ""]
    if grammar.get("type") == "grammar" and isinstance(grammar.get("definition"), str):
        parts.append(f"The input must match this {grammar.get('syntax')} grammar:\n{grammar['definition']}")
    return "\n\n".join(filter(None, parts))
