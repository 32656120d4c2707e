"""Answers in OpenAI's shapes, with our id and the version that served, and without fields that the client did not
request.

Chat completions are here; `responses_api` and `messages_api` have the shapes of the other APIs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import JsonValue
from pydantic_core import to_json

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests import client_connection
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.chat_request import FUNCTION_CALL, ChatRequest, old_fields
from headrace_gateway.requests.engine_wire import EngineAnswer, EngineChoice, EngineMessage, EngineToolCall, EngineUsage
from headrace_gateway.requests.request_context import IGNORED_HEADER, header_value

Json = dict[str, Any]
_DONE = client_connection.encode_event(client_connection.DONE)


class StreamedAnswer(Protocol):
    """Encoder of one streamed answer as server-sent events."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the response headers in addition to those of a stream."""

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        """Return the encoded events of one chunk, possibly none. The first chunk sets the `version` of the stream."""

    @property
    def ping(self) -> bytes:
        """Return the bytes that keep a silent stream open, or none if the API has no such event."""

    def end(self) -> bytes:
        """Return the last bytes of the stream, after the turn was stored durably."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that reports `error` to a client whose stream has already begun."""


class AnswerShape(Protocol):
    """Format in which one API (chat, completions, Responses, Messages) returns answers, plain or streamed."""

    def headers(self, call: ChatCall) -> Mapping[str, str]:
        """Return the response headers of an answer that is not streamed, except content type and length."""

    def plain_body(self, call: ChatCall, answer: EngineAnswer) -> bytes:
        """Return the response body of an answer that is not streamed."""

    def streamed(self, call: ChatCall) -> StreamedAnswer: ...


@dataclass(slots=True)
class OpenPart:
    """Part of an answer whose deltas are still arriving: text, reasoning or a tool call. `kind` is the API's name of
    its type."""

    kind: str
    pieces: list[str] = field(default_factory=list, kw_only=True)
    """Pieces of the text, of the reasoning, or of the arguments of a tool call, in order of arrival."""
    call_index: int | None = field(default=None, kw_only=True)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


P = TypeVar("P", bound=OpenPart)


class PartWriter(ABC, Generic[P]):
    """Converter of an engine's chunks to the events of one answer that consists of consecutive parts, one open at a
    time."""

    REASONING: ClassVar[str]
    TEXT: ClassVar[str]
    """The API's names of parts with reasoning and of parts with text."""

    def __init__(self) -> None:
        self._open: P | None = None
        self._finish: str | None = None
        self._usage: EngineUsage | None = None

    def _add_message(self, message: EngineMessage) -> list[Json]:
        """Convert a message, or a streamed delta of one, to events."""
        events: list[Json] = []
        for kind, text in ((self.REASONING, message.reasoning_content), (self.TEXT, message.content)):
            if text:
                if self._open is None or self._open.kind != kind:
                    events += self._begin(kind)
                assert self._open is not None
                self._open.pieces.append(text)
                events.append(self._text_event(text))
        for index, call in message.indexed_calls:
            events += self._add_call(index, call)
        return events

    @abstractmethod
    def _begin(self, kind: str) -> list[Json]:
        """Close the open part if there is one, open a part of this kind, and return the events of both."""

    @abstractmethod
    def _text_event(self, text: str) -> Json:
        """Append `text` to the open part, and return the event that reports it."""

    @abstractmethod
    def _add_call(self, index: int, call: EngineToolCall) -> list[Json]:
        """Append a delta to the tool call with this index, opening its part if needed, and return the events."""


class ChatCompletions:
    """Answers in the format of `POST /v1/chat/completions`."""

    def headers(self, call: ChatCall) -> Mapping[str, str]:
        return answer_headers(call)

    def plain_body(self, call: ChatCall, answer: EngineAnswer) -> bytes:
        return completion_body(call, answer)

    def streamed(self, call: ChatCall) -> StreamedAnswer:
        return Chunks(call)


def answer_headers(call: ChatCall) -> dict[str, str]:
    """Return the headers that every API sends with an answer: the response id, and the request's fields that had no
    effect."""
    headers = {"x-request-id": call.response_id}
    if call.ignored:
        headers[IGNORED_HEADER] = header_value(call.ignored)
    return headers


def completion_body(call: ChatCall, answer: EngineAnswer) -> bytes:
    """Return a plain (not streamed) chat completion as JSON."""
    request = call.request
    body: dict[str, object] = {
        **_head(call, "chat.completion", answer.model),
        "choices": [
            _choice(request, choice, "message", _message(request, choice.message)) for choice in answer.choices
        ],
        "usage": answer.usage and answer.usage.model_dump(exclude_none=True),
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = answer.prompt_token_ids
    return to_json(body)


class Chunks:
    """Encoder of one streamed chat completion: each chunk of a replica becomes zero, one or two events."""

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        options = call.request.stream_options
        self._usage = options is not None and options.include_usage
        self._head: bytes | None = None
        self.headers = answer_headers(call)
        self.ping = client_connection.COMMENT

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        """Return the encoded events of one chunk, at most two. The first chunk sets the `version` of the stream."""
        if self._head is None:
            self._head = to_json(_head(self._call, "chat.completion.chunk", version))[:-1]
        request = self._call.request
        choices = [
            _choice(request, choice, "delta", _delta(request, choice.delta))
            for choice in chunk.choices
            if _has_content(request, choice)
        ]
        events = b""
        first_ids = chunk.prompt_token_ids if request.return_token_ids else None
        if choices or first_ids:
            more: dict[str, object] = {"choices": choices}
            if self._usage:
                more["usage"] = None
            if first_ids:
                more["prompt_token_ids"] = first_ids
            events = self._event(self._head, more)
        if self._usage and chunk.usage is not None:
            usage = chunk.usage.model_dump(exclude_none=True)
            events += self._event(self._head, {"choices": [], "usage": usage})
        return events

    def end(self) -> bytes:
        return _DONE

    def error_event(self, error: ApiError) -> bytes:
        return client_connection.encode_event(error.body)

    @staticmethod
    def _event(head: bytes, more: dict[str, object]) -> bytes:
        return client_connection.encode_event(head + b"," + to_json(more)[1:])


def _head(call: ChatCall, kind: str, version: str) -> dict[str, JsonValue]:
    return {
        "id": call.response_id,
        "object": kind,
        "created": int(call.started_at.timestamp()),
        "model": version,
    }


def _choice(request: ChatRequest, choice: EngineChoice, key: str, message: JsonValue) -> dict[str, object]:
    finish = choice.finish_reason
    fields: dict[str, object] = {
        "index": choice.index,
        key: message,
        "logprobs": choice.logprobs.model_dump() if request.logprobs and choice.logprobs else None,
        "finish_reason": FUNCTION_CALL if request.functions and finish == "tool_calls" else finish,
    }
    if request.return_token_ids:
        fields["token_ids"] = choice.token_ids
    return fields


def _delta(request: ChatRequest, delta: EngineMessage) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = delta.model_dump(exclude_unset=True, exclude_none=True)
    if request.functions and delta.tool_calls:
        del fields["tool_calls"]
        fields |= old_fields(delta)
    return fields


def _message(request: ChatRequest, message: EngineMessage) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = message.model_dump(exclude_none=True, exclude={"tool_calls"})
    fields = {"role": "assistant", "content": message.content, "refusal": None, **fields}
    if message.tool_calls and request.functions:
        fields |= old_fields(message)
    elif message.tool_calls:
        calls = [call.model_dump(exclude_none=True, exclude={"index"}) for call in message.tool_calls]
        fields["tool_calls"] = [{"type": "function", **call} for call in calls]
    return fields


def _has_content(request: ChatRequest, choice: EngineChoice) -> bool:
    """Return whether a chunk contains anything that the client requested.

    Some chunks contain only token ids, because their text is still incomplete. They go only to clients that requested
    token ids or logprobs.
    """
    delta = choice.delta
    parts = (delta.role, delta.content, delta.reasoning_content, delta.refusal, delta.tool_calls, choice.finish_reason)
    if any(part for part in parts):
        return True
    return bool((request.return_token_ids and choice.token_ids) or (request.logprobs and choice.logprobs))
