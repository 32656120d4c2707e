"""`input`: from the items of a conversation to chat messages.

What a model said in one turn is several items, its reasoning, its text and each call, and one message of a chat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from headrace_schemas.base import LongText, Model, Text

_TEXT_PARTS = ("input_text", "output_text", "text")
"""Types of parts that are text. A tuple: the `type` that a caller sends need not be hashable."""


def _content(value: Any) -> Any:
    """Text, or parts of text; anything else is refused in words that say what it was."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"parts of type {str(kind)[:40]!r} are not supported; only text is")
    return tuple(part["text"] for part in value)


Content = Annotated[tuple[LongText, ...], BeforeValidator(_content)]


class _Item(Model):
    """Ids, states and what else a server added when it gave the item out say nothing here."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(_Item):
    """Somebody's words, or the model's."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class CallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: LongText


class CallOutputItem(_Item):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningText(_Item):
    """A part of `ReasoningItem`."""

    text: LongText


class ReasoningItem(_Item):
    """What the model thought before it spoke."""

    type: Literal["reasoning"]
    content: tuple[ReasoningText, ...] | None = None


def _kind(value: Any) -> Any:
    """An item says its type; a plain message need not."""
    if not isinstance(value, dict):
        raise ValueError("must be an item: an object with a type")
    kind = value.get("type", "message")
    if kind not in _KINDS:
        raise ValueError(f"items of type {str(kind)[:40]!r} are not supported; there are {', '.join(_KINDS)}")
    return {"type": kind, **value}


_KINDS = ("message", "function_call", "function_call_output", "reasoning")
Item = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_kind),
]
Json = dict[str, JsonValue]


def messages_of(items: Iterable[Item]) -> list[Json]:
    """As `POST /v1/chat/completions` takes them."""
    found: list[Json] = []
    turn: Json | None = None
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if turn is None or turn.get("content"):
                    turn = _turn(found)
                turn["content"] = _text(item.content)
            case MessageItem():
                turn = None
                found.append({"role": item.role, "content": _text(item.content)})
            case CallOutputItem():
                turn = None
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case ReasoningItem():
                said = "".join(part.text for part in item.content or ())
                if said:
                    turn = _turn(found)
                    turn["reasoning_content"] = said
            case CallItem():
                if turn is None:
                    turn = _turn(found)
                calls = turn.setdefault("tool_calls", [])
                assert isinstance(calls, list)
                function: Json = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
    return found


def _turn(messages: list[Json]) -> Json:
    """Another message of the model's, at the end of `messages`."""
    made: Json = {"role": "assistant"}
    messages.append(made)
    return made


def _text(parts: Sequence[str]) -> JsonValue:
    if len(parts) == 1:
        return parts[0]
    return [{"type": "text", "text": part} for part in parts]
