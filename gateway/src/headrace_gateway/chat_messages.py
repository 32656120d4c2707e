"""Messages as clients send them: OpenAI's format, and the fields that SDKs add when they echo an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, JsonValue, model_validator

from headrace_schemas import FunctionCall, Message, TextPart, ToolCall
from headrace_schemas.base import LongText, Model, Text
from headrace_schemas.events.chat import Role
from headrace_schemas.plain_values import none_if_empty


def _content(value: Any) -> Any:
    """Text or text parts; anything else is refused in words that say what it was."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"parts of type {str(kind)[:40]!r} are not supported; only text is")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part needs its text as a string")
    return [{"type": "text", "text": part["text"]} for part in value]


def says_something(value: JsonValue) -> bool:
    """False for null, "", [], {}, and for what holds nothing else.

    SDKs echo an answer's message with bookkeeping of their own around it. An empty
    field asks for nothing, whatever its name; false and 0 do.
    """
    if isinstance(value, dict):
        return any(map(says_something, value.values()))
    if isinstance(value, list):
        return any(map(says_something, value))
    return value is not None and value != ""


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a string that holds JSON, as the model wrote it")
    return value


class CalledFunction(Model):
    """The function of an echoed tool call; SDKs may add what they parsed from the arguments."""

    model_config = ConfigDict(extra="ignore")

    name: Text
    arguments: Annotated[LongText, BeforeValidator(_arguments)]


class EchoedToolCall(Model):
    """A tool call that the model made before; SDKs may add its index in the stream."""

    model_config = ConfigDict(extra="ignore")

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def event(self) -> ToolCall:
        return ToolCall(id=self.id, function=FunctionCall(name=self.function.name, arguments=self.function.arguments))


class ChatMessage(Model):
    """One message of a request."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: Annotated[LongText | tuple[TextPart, ...] | None, BeforeValidator(_content)] = None
    name: Annotated[Text | None, BeforeValidator(none_if_empty)] = None
    tool_calls: tuple[EchoedToolCall, ...] | None = None
    tool_call_id: Text | None = None
    reasoning_content: LongText | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name == "reasoning" and isinstance(value, str):
                continue
            if says_something(value):
                raise ValueError(f"field {name[:80]!r} in a message is not supported; leave it out or empty")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool's message needs the tool_call_id that it answers")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

    def event(self) -> Message:
        """The message as events carry it; without what SDKs added."""
        reasoning = self.reasoning_content or (self.model_extra or {}).get("reasoning")
        calls = tuple(call.event() for call in self.tool_calls) if self.tool_calls else None
        return Message(
            role=self.role,
            content=self.content,
            name=self.name,
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
            reasoning_content=reasoning,
        )
