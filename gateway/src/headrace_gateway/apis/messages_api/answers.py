"""Answers in the format of Anthropic's Messages API, as JSON and as a stream of events, and the reader of its
requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import from_json, to_json

from headrace_gateway.access.refusals import REQUEST_ID_HEADER, ApiError
from headrace_gateway.apis.answers import AnswerShape, Json, OpenPart, PartWriter, StreamedAnswer, answer_headers
from headrace_gateway.apis.messages_api.request import MessagesRequest, parse_messages
from headrace_gateway.requests import client_connection
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.engine_wire import EngineAnswer, EngineChoice, EngineToolCall, EngineUsage
from headrace_gateway.requests.request_context import RequestContext

SIGNATURE = "aGVhZHJhY2U="
"""The signature of thinking blocks. The gateway does not check the signature of a block that a client sends back."""
_TAIL_BYTES = 1024
"""Bytes of sampled text that are kept to find the stop sequence that ended an answer."""


class StopFinder:
    """Detector of the stop sequence that ended an answer. Engines cut it from the text, but its tokens were sampled."""

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._sequences = stop_sequences
        self._tail = b""
        self._last_length = 0

    def add(self, choice: EngineChoice) -> None:
        """Append the text of a chunk's sampled tokens to the tail that is searched."""
        if not self._sequences or choice.logprobs is None:
            return
        for entry in (choice.logprobs.content or ())[-_TAIL_BYTES:]:
            exact = entry.get("bytes")
            piece = bytes(exact) if exact is not None else (entry.get("token") or "").encode()
            self._last_length = len(piece)
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]

    def completed_sequence(self) -> str | None:
        """Return the stop sequence that ends with the last sampled token, or None."""
        for sequence in self._sequences:
            encoded = sequence.encode()
            if encoded in self._tail[-(len(encoded) + max(self._last_length - 1, 0)) :]:
                return sequence
        return None


def build_message(
    message_id: str,
    version: str,
    content: Sequence[Json],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: Json,
) -> Json:
    """Return a message as the Messages API represents it, for a plain response or for the first event of a stream."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": version,
        "content": list(content),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "stop_details": None,
        "usage": usage,
    }


def usage_of(usage: EngineUsage | None, prompt_tokens: int) -> Json:
    """Return the `usage` block of a message. `input_tokens` counts only the tokens that were not read from the prefix
    cache.

    Args:
        usage: The engine's count, or None before the end of the answer.
        prompt_tokens: Tokens of the prompt, for an answer that has not ended.
    """
    cached = ((usage.prompt_tokens_details or {}).get("cached_tokens") or 0) if usage else 0
    cached = cached if isinstance(cached, int) else 0
    return {
        "input_tokens": (usage.prompt_tokens if usage else prompt_tokens) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens if usage else 0,
    }


def tool_input(arguments: str) -> Json:
    """Return the JSON object in the arguments of a tool call. Arguments that are not a JSON object, or contain numbers
    beyond float64 such as 1e999, are returned as a text under the key `arguments`."""
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}


@dataclass(slots=True)
class _OpenBlock(OpenPart):
    """Content block whose deltas are still arriving."""

    index: int
    call_id: str = ""
    name: str = ""

    def content(self) -> Json:
        """Return the block with the text or arguments that have arrived so far."""
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": self.text, "signature": SIGNATURE}
            case "tool_use":
                content = tool_input(self.text)
                return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": content}
        return {"type": "text", "text": self.text}

    def empty(self) -> Json:
        """Return the block without content, as the event that opens it reports it."""
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "tool_use":
                return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}}
        return {"type": "text", "text": ""}


class MessageWriter(PartWriter[_OpenBlock]):
    """Converter of an engine's chunks to the events of one message.

    Args:
        message_id: The id of the response, which feedback names.
        stop_sequences: The stop sequences of the request.
        max_tokens: The limit of the request. An answer that is cut earlier has reached the end of the context.
    """

    REASONING = "thinking"
    TEXT = "text"

    def __init__(self, message_id: str, stop_sequences: tuple[str, ...], max_tokens: int) -> None:
        super().__init__()
        self._id = message_id
        self._max_tokens = max_tokens
        self._stops = StopFinder(stop_sequences)
        self._content: list[Json] = []
        self._version: str | None = None
        self._prompt_tokens = 0

    def add(self, answer: EngineAnswer, version: str, *, streamed: bool) -> list[Json]:
        """Convert a chunk of a replica's answer to events of the Messages API.

        Args:
            streamed: whether the chunk's choices have deltas instead of whole messages.
        """
        events: list[Json] = []
        self._usage = answer.usage or self._usage
        self._prompt_tokens = self._prompt_tokens or len(answer.prompt_token_ids or ())
        if self._version is None:
            self._version = version
            events += [{"type": "message_start", "message": self._message([], None, None)}, {"type": "ping"}]
        for choice in answer.choices:
            self._stops.add(choice)
            events += self._add_message(choice.delta if streamed else choice.message)
            self._finish = choice.finish_reason or self._finish
        return events

    def end(self) -> list[Json]:
        """Return the events that end the stream: the stop reason, the usage and `message_stop`."""
        events = self._close()
        reason, sequence = self._stop_reason()
        usage = usage_of(self._usage, self._prompt_tokens)
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        return [*events, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def message(self) -> Json:
        """Return the complete message. Call it after `end`."""
        return self._message(self._content, *self._stop_reason())

    def _message(self, content: list[Json], reason: str | None, sequence: str | None) -> Json:
        usage = usage_of(self._usage, self._prompt_tokens)
        return build_message(self._id, self._version or "", content, reason, sequence, usage)

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return `stop_reason` and `stop_sequence` of the finished message."""
        if self._finish == "length":
            sampled = self._usage.completion_tokens if self._usage else self._max_tokens
            return ("max_tokens" if sampled >= self._max_tokens else "model_context_window_exceeded"), None
        sequence = self._stops.completed_sequence() if self._finish == "stop" else None
        if sequence is not None:
            return "stop_sequence", sequence
        called = any(block["type"] == "tool_use" for block in self._content)
        return ("tool_use" if called or self._finish == "tool_calls" else "end_turn"), None

    def _text_event(self, text: str) -> Json:
        assert self._open is not None
        return self._delta(f"{self._open.kind}_delta", self._open.kind, text)

    def _add_call(self, index: int, call: EngineToolCall) -> list[Json]:
        """Append a delta to a tool call. The arguments are sent once they are complete, because clients parse them as
        JSON and models do not always write valid JSON."""
        events: list[Json] = []
        if self._open is None or self._open.kind != "tool_use" or self._open.call_index != index:
            events = self._begin("tool_use", call, index)
        assert self._open is not None
        self._open.pieces.append(call.function.arguments or "")
        return events

    def _begin(self, kind: str, call: EngineToolCall | None = None, call_index: int | None = None) -> list[Json]:
        events = self._close()
        block = self._open = _OpenBlock(kind, len(self._content), call_index=call_index)
        if call is not None:
            block.call_id, block.name = call.id or f"call_{block.index}", call.function.name or ""
        start = {"type": "content_block_start", "index": block.index, "content_block": block.empty()}
        return [*events, start]

    def _close(self) -> list[Json]:
        block = self._open
        if block is None:
            return []
        events: list[Json] = []
        content = block.content()
        if block.kind == "thinking":
            events.append(self._delta("signature_delta", "signature", SIGNATURE))
        elif block.kind == "tool_use" and content["input"]:
            events.append(self._delta("input_json_delta", "partial_json", _json_text(block.text, content["input"])))
        self._content.append(content)
        self._open = None
        return [*events, {"type": "content_block_stop", "index": block.index}]

    def _delta(self, kind: str, name: str, text: str) -> Json:
        assert self._open is not None
        return {"type": "content_block_delta", "index": self._open.index, "delta": {"type": kind, name: text}}


def _json_text(arguments: str, content: Json) -> str:
    """Return the arguments as the model wrote them if they are a JSON object, else the JSON object that replaces
    them."""
    return to_json(content).decode() if content == {"arguments": arguments} else arguments


class Messages:
    """Answers to one request in the format of `POST /v1/messages`."""

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request

    def headers(self, call: ChatCall) -> Mapping[str, str]:
        return {**answer_headers(call), REQUEST_ID_HEADER: call.response_id}

    def plain_body(self, call: ChatCall, answer: EngineAnswer) -> bytes:
        writer = self._writer(call)
        writer.add(answer, answer.model, streamed=False)
        writer.end()
        return to_json(writer.message())

    def streamed(self, call: ChatCall) -> StreamedAnswer:
        return _Events(self._writer(call), self.headers(call))

    def _writer(self, call: ChatCall) -> MessageWriter:
        return MessageWriter(call.response_id, self._request.stop_sequences or (), self._request.max_tokens)


class _Events:
    """Encoder of one streamed answer as server-sent events."""

    def __init__(self, writer: MessageWriter, headers: Mapping[str, str]) -> None:
        self._writer = writer
        self.headers = headers
        self.ping = client_connection.encode_typed([{"type": "ping"}])

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        return client_connection.encode_typed(self._writer.add(chunk, version, streamed=True))

    def end(self) -> bytes:
        return client_connection.encode_typed(self._writer.end())

    def error_event(self, error: ApiError) -> bytes:
        return client_connection.encode_event(error.anthropic_body(self.headers[REQUEST_ID_HEADER]), "error")


def read_messages(body: bytes, context: RequestContext) -> tuple[ChatRequest, AnswerShape]:
    """Read a body of `POST /v1/messages`."""
    request, chat_request = parse_messages(body, context)
    return chat_request, Messages(request)
