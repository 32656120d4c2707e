"""Items of a conversation in the request field `input`, and their conversion to chat messages.

One turn of the model is several items (its reasoning, its text and each call) and one message of a chat.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, ValidationInfo
from pydantic_core import to_json

from headrace_gateway.apis.responses_api.tools import RequestTool, chat_name
from headrace_gateway.requests.chat_messages import MEDIA_PARTS
from headrace_gateway.requests.request_context import context_of
from headrace_schemas.values.base import LongText, Model, Text

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "refusal")
"""Types of content parts that are text. This is a tuple because the `type` that a caller sends may be unhashable."""
_SERVER_ITEMS = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
    "tool_search_call", "tool_search_output",
)  # fmt: skip
"""Items of tools that OpenAI's servers run. They are left out of the prompt, because these tools are not offered."""
_REASONING_MARK = b"headrace\x01"
"""First bytes of the reasoning that this gateway encodes into `encrypted_content`, by which it recognizes its own."""


def _content(value: Any, info: ValidationInfo) -> Any:
    """Return the texts of a message's content. Parts of other types are refused, or replaced by a text where the
    settings allow it."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    return tuple(_part_text(part, info) for part in value)


def _part_text(part: Any, info: ValidationInfo) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_PARTS:
        return context_of(info).media_text(str(kind))
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise ValueError(f"parts of type {str(kind)[:40]!r} are not supported; only text is")
    return text


Content = Annotated[tuple[LongText, ...], BeforeValidator(_content)]


class _Item(Model):
    """Item of a conversation. Ids, states and other fields that a server added are ignored."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(_Item):
    """A message of the user, the operator or the model."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class CallItem(_Item):
    """Call of a function by the model."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: LongText
    namespace: Text | None = None


class CustomCallItem(_Item):
    """Call of a custom tool by the model."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: LongText
    namespace: Text | None = None


class CallOutputItem(_Item):
    """Result of the call of a function or custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


class ReasoningText(_Item):
    """Text of one part of a `ReasoningItem`."""

    text: LongText


class ReasoningItem(_Item):
    """Reasoning of the model. `encrypted_content` is decoded if this gateway encoded it."""

    type: Literal["reasoning"]
    content: tuple[ReasoningText, ...] | None = None
    encrypted_content: LongText | None = None

    @property
    def text(self) -> str:
        """Whole text of the reasoning; empty if another server encrypted it."""
        text = "".join(part.text for part in self.content or ())
        return text or decode_reasoning(self.encrypted_content or "")


class ReferenceItem(_Item):
    """Reference by id to an item of a stored response."""

    type: Literal["item_reference"]
    id: Text


class ToolsItem(_Item):
    """Tools that the model may use from this point of the conversation on, an item type of Codex CLI."""

    type: Literal["additional_tools"]
    tools: tuple[RequestTool, ...]


def _kind(value: Any, info: ValidationInfo) -> Any:
    """Add the type to an item that clients may send without one (a message or a reference), and mark items of server
    tools as left out."""
    if not isinstance(value, dict):
        raise ValueError("must be an item: an object with a type")
    untyped = "message" if "role" in value or "id" not in value else "item_reference"
    kind = value.get("type", untyped)
    if kind in _SERVER_ITEMS:
        context_of(info).ignore(f"input.{kind}", "the tools of OpenAI's servers are not part of the prompt")
        return {"type": "server", "kind": kind}
    if kind not in _KINDS:
        raise ValueError(f"items of type {str(kind)[:40]!r} are not supported; there are {', '.join(_KINDS)}")
    return {**value, "type": kind}


_KINDS = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
    "item_reference", "additional_tools",
)  # fmt: skip


class LeftOutItem(_Item):
    """Item that is left out of the prompt, because a server's tool created it."""

    type: Literal["server"]


Item = Annotated[
    Annotated[
        MessageItem
        | CallItem
        | CustomCallItem
        | CallOutputItem
        | ReasoningItem
        | ReferenceItem
        | ToolsItem
        | LeftOutItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_kind),
]
Json = dict[str, JsonValue]


def messages_of(items: Iterable[Item]) -> list[Json]:
    """Convert the items of a conversation, without references, to messages of `POST /v1/chat/completions`."""
    messages: list[Json] = []
    answer: Json | None = None
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if answer is None or answer.get("content"):
                    answer = _new_answer(messages)
                answer["content"] = _text(item.content)
            case MessageItem():
                answer = None
                messages.append({"role": item.role, "content": _text(item.content)})
            case CallOutputItem():
                answer = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case ReasoningItem():
                if item.text:
                    answer = _new_answer(messages)
                    answer["reasoning_content"] = item.text
            case CallItem() | CustomCallItem():
                if answer is None:
                    answer = _new_answer(messages)
                calls = answer.setdefault("tool_calls", [])
                assert isinstance(calls, list)
                calls.append(_call(item))
    return messages


def begins_with_answer(items: Iterable[Item]) -> bool:
    """Return whether the first message of `items` is an answer of the model, which may be joined with the message
    before it."""
    first = next((item for item in items if not isinstance(item, ToolsItem | LeftOutItem)), None)
    is_message = isinstance(first, MessageItem) and first.role == "assistant"
    return is_message or isinstance(first, ReasoningItem | CallItem | CustomCallItem)


def _call(item: CallItem | CustomCallItem) -> Json:
    if isinstance(item, CustomCallItem):
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    else:
        arguments = item.arguments
    function: Json = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _new_answer(messages: list[Json]) -> Json:
    """Append another message of the model to `messages` and return it."""
    answer: Json = {"role": "assistant"}
    messages.append(answer)
    return answer


def _text(parts: Sequence[str]) -> JsonValue:
    if len(parts) == 1:
        return parts[0]
    return [{"type": "text", "text": part} for part in parts]


def size_of(items: Iterable[Item]) -> int:
    """Return the number of bytes of `items` as JSON."""
    return sum(len(to_json(item)) for item in items)


def encode_reasoning(text: str) -> str:
    """Encode reasoning for the field `encrypted_content`: base64, which is neither secret nor meant to be read by
    clients."""
    return base64.b64encode(_REASONING_MARK + text.encode()).decode()


def decode_reasoning(encoded: str) -> str:
    """Decode reasoning that `encode_reasoning` encoded. Return an empty text for the reasoning of other servers."""
    try:
        content = base64.b64decode(encoded, validate=True)
        return content.removeprefix(_REASONING_MARK).decode() if content.startswith(_REASONING_MARK) else ""
    except ValueError:
        return ""
