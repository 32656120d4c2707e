"""Parsing of chat messages in OpenAI's format, with fields that SDKs add to answers they send back, and a cache of
parsed messages.

A client sends its whole conversation with each call. A message is cached only if its parsing depends on nothing but the
message.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, JsonValue, ValidationInfo, WrapValidator, model_validator
from pydantic_core import to_json

from headrace_gateway.requests.request_context import MESSAGE_HINTS, context_of
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import FunctionCall, Message, TextPart, ToolCall
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.text import none_if_empty

MEDIA_PARTS = (
    "image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file", "document",
    "container_upload",
)  # fmt: skip
"""Types of content parts that are media. This is a tuple because the `type` that a caller sends may be unhashable."""
_BYTES_MAX = 33_554_432
_MESSAGE_LENGTH_MAX = 65_536
_OBJECT_BYTES = 1536
"""Estimated bytes of a cached message in addition to its text, which is stored as parsed, as event and as JSON."""
_FIELDS = frozenset(("role", "content", "tool_calls", "tool_call_id", "name"))


def _content(value: Any, info: ValidationInfo) -> Any:
    """Return the content as text or as text parts. Parts of other types are refused, or replaced by a text where the
    settings allow it."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    return [{"type": "text", "text": _part_text(part, info)} for part in value]


def _part_text(part: Any, info: ValidationInfo) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_PARTS:
        return context_of(info).media_text(str(kind))
    if kind not in ("text", "refusal"):
        raise ValueError(f"parts of type {str(kind)[:40]!r} are not supported; only text is")
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError("a text part needs its text as a string")
    return text


def is_non_empty(value: JsonValue) -> bool:
    """Return whether a value contains anything: it is not null, "", [], {} or a container of such values alone.

    An empty field that an SDK added to a message has no effect, whatever its name. False and 0 count as values.
    """
    if isinstance(value, dict):
        return any(map(is_non_empty, value.values()))
    if isinstance(value, list):
        return any(map(is_non_empty, value))
    return value is not None and value != ""


def _arguments(value: Any) -> Any:
    if isinstance(value, dict):  # some clients send the parsed object
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, str):
        raise ValueError("must be a string that holds JSON, as the model wrote it")
    return value


class CalledFunction(Model):
    """Function of an earlier tool call that the client sends back. SDKs may add the parsed arguments."""

    model_config = ConfigDict(extra="ignore")

    name: Text
    arguments: Annotated[LongText, BeforeValidator(_arguments)]


class EchoedToolCall(Model):
    """Earlier tool call that the client sends back. SDKs may add its index in the stream."""

    model_config = ConfigDict(extra="ignore")

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def event(self) -> ToolCall:
        return ToolCall(id=self.id, function=FunctionCall(name=self.function.name, arguments=self.function.arguments))


class ChatMessage(Model):
    """One message of a chat request."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[LongText | tuple[TextPart, ...] | None, BeforeValidator(_content)] = None
    name: Annotated[Text | None, BeforeValidator(none_if_empty)] = None
    tool_calls: tuple[EchoedToolCall, ...] | None = None
    tool_call_id: Text | None = None
    function_call: CalledFunction | None = None
    """Single tool call in OpenAI's deprecated format. Its result is a message with the role `function`."""
    reasoning_content: LongText | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, value: Any) -> Any:
        """Replace the content null of a tool's message by an empty text, and use the refusal of an assistant as its
        content."""
        if isinstance(value, dict) and value.get("content") is None:
            if value.get("role") in ("tool", "function") and "content" in value:
                return {**value, "content": ""}
            if value.get("role") == "assistant" and isinstance(value.get("refusal"), str):
                return {**value, "content": value["refusal"], "refusal": None}
        return value

    @model_validator(mode="after")
    def _is_whole(self, info: ValidationInfo) -> Self:
        for name, value in (self.model_extra or {}).items():
            if (name == "reasoning" and isinstance(value, str)) or not is_non_empty(value):
                continue
            if name not in MESSAGE_HINTS or context_of(info).rules.strict:
                raise ValueError(f"field {name[:80]!r} in a message is not supported; leave it out or empty")
            context_of(info).ignore(f"messages.{name}")
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        if self.tool_calls and self.function_call:
            raise ValueError("function_call is the old form of tool_calls; send one of them")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool's message needs the tool_call_id that it answers")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

    @cached_property
    def event(self) -> Message:
        """The message in the form of turn events, without the fields that SDKs added."""
        assert self.role != "function", "`with_tools` translates such messages"
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

    @cached_property
    def event_json(self) -> bytes:
        """The message as JSON in a turn event."""
        return message_json(self.event)


def _read(value: Any, validate: Callable[[Any], ChatMessage], info: ValidationInfo) -> ChatMessage:
    known = context_of(info).known_messages
    return validate(value) if known is None else known.read(value, validate)


ReadMessage = Annotated[ChatMessage, WrapValidator(_read)]
"""Message of a request, taken from the cache if an equal message was parsed before."""


def message_json(message: Message) -> bytes:
    """Return the JSON of a message as turn events contain it."""
    return message.model_dump_json(exclude_none=True).encode()


class MessageMemory:
    """Bounded cache of parsed messages, by tenant and JSON of the message. Thread-safe.

    Agents send the whole conversation with each call. With the cache, only new messages are parsed.
    """

    def __init__(self) -> None:
        self._messages: TenantMemory[bytes, ChatMessage] = TenantMemory(_BYTES_MAX)
        self._lock = threading.Lock()

    def view(self, tenant: str) -> TenantMessages:
        """Return the part of the cache that belongs to `tenant`."""
        return TenantMessages(self, tenant)

    def get(self, tenant: str, key: bytes) -> ChatMessage | None:
        """Return the cached message of `tenant` under `key`, or None."""
        with self._lock:
            return self._messages.get(tenant, key)

    def set(self, tenant: str, key: bytes, message: ChatMessage, size_bytes: int) -> None:
        """Store a message, and evict others if the cache is full."""
        with self._lock:
            self._messages.set(tenant, key, message, size_bytes)


class TenantMessages:
    """Cached messages of one tenant."""

    def __init__(self, memory: MessageMemory, tenant: str) -> None:
        self._memory = memory
        self._tenant = tenant

    def read(self, value: Any, validate: Callable[[Any], ChatMessage]) -> ChatMessage:
        """Return the message that `validate` parses from `value`, from the cache if it contains it."""
        key = _key_of(value)
        message = None if key is None else self._memory.get(self._tenant, key)
        if message is None:
            message = validate(value)
            if key is not None and len(key) <= _MESSAGE_LENGTH_MAX:
                self._memory.set(self._tenant, key, message, _OBJECT_BYTES + 4 * len(key))
        return message


def _key_of(value: Any) -> bytes | None:
    """Return the cache key of a message, which is equal for equal messages, or None if the message must not be
    cached."""
    if not isinstance(value, dict) or not value.keys() <= _FIELDS or value.get("role") == "function":
        return None
    return to_json(value) if isinstance(value.get("content"), str | None) else None
