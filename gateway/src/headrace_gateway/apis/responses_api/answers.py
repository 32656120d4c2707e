"""Answers in the format of OpenAI's Responses API, as JSON and as a stream of events, and the reader of its requests.

The items of an answer are written one after the other: the event `added`, its deltas, `done`. A plain answer is written
by the same code as a single chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter
from pydantic_core import to_json

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.answers import AnswerShape, OpenPart, PartWriter, StreamedAnswer, answer_headers
from headrace_gateway.apis.responses_api import output
from headrace_gateway.apis.responses_api.items import Item, size_of
from headrace_gateway.apis.responses_api.output import Json, ResponseFrame
from headrace_gateway.apis.responses_api.request import ParsedResponses, ResponsesRequest, parse_responses
from headrace_gateway.apis.responses_api.tools import CustomTool, OfferedTool
from headrace_gateway.requests import client_connection
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.engine_wire import (
    EngineAnswer,
    EngineChoice,
    EngineToolCall,
    EngineUsage,
    TokenLogprob,
)
from headrace_gateway.requests.request_context import RequestContext
from headrace_gateway.requests.response_store import CallerResponses, StoredResponse, named_items
from headrace_schemas.events.turn import ResponseRecord

_PREFIXES = {
    "msg": "response.output_text",
    "rs": "response.reasoning_text",
    "fc": "response.function_call_arguments",
    "ctc": "response.custom_tool_call_input",
}
"""Prefix of the event names of each kind of item. The kinds are the prefixes of item ids."""
_CALLS = ("fc", "ctc")


@dataclass(slots=True)
class _OpenItem(OpenPart):
    """Item of the response whose deltas are still arriving."""

    item_id: str
    position: int
    encrypts: bool
    call: EngineToolCall = field(default_factory=EngineToolCall)
    tool: OfferedTool | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def item(self, status: str, *, begun: bool = True, shows_logprobs: bool = False) -> Json:
        """Return the item with the text or arguments that have arrived so far."""
        text = self.text if begun else None
        match self.kind:
            case "msg":
                return output.message(self.item_id, text, status, self.logprobs if shows_logprobs and begun else None)
            case "rs":
                return output.reasoning(self.item_id, text, status, encrypts=self.encrypts)
            case "ctc":
                assert self.tool is not None
                return output.custom_tool_call(self.item_id, self.call.id, self.tool, self.text, status)
        name = self.call.function.name
        return output.function_call(self.item_id, self.call.id, name, self.tool, self.text, status)

    def part(self) -> Json:
        """Return the content part (text or reasoning) of this item in the format of the Responses API."""
        return output.text_part(self.text) if self.kind == "msg" else output.reasoning_part(self.text)


class ResponseWriter(PartWriter[_OpenItem]):
    """Converter of the streamed deltas of an engine's answer to events of the Responses API."""

    REASONING = "rs"
    TEXT = "msg"

    def __init__(self, frame: ResponseFrame, *, shows_logprobs: bool) -> None:
        super().__init__()
        self._frame = frame
        self._shows_logprobs = shows_logprobs
        self._number = 0
        self._begun = False
        self._items: list[Json] = []
        self._version = ""
        self._pending_logprobs: list[TokenLogprob] = []
        """Logprobs of tokens that have made no text yet."""

    def add(
        self, version: str, choices: list[EngineChoice], usage: EngineUsage | None, *, streamed: bool
    ) -> list[Json]:
        """Convert a chunk to events.

        Args:
            streamed: whether the chunk's choices have deltas instead of whole messages.
        """
        self._version = self._version or version
        self._usage = usage or self._usage
        events: list[Json] = []
        for choice in choices:
            if not self._begun:
                self._begun = True
                opened = self._frame.response("in_progress", self._version, [], None, None)
                events += [{"type": "response.created", "response": opened}]
                events += [{"type": "response.in_progress", "response": opened}]
            if self._shows_logprobs and choice.logprobs is not None:
                self._pending_logprobs += choice.logprobs.content or ()
            events += self._add_message(choice.delta if streamed else choice.message)
            self._finish = choice.finish_reason or self._finish
        return self._numbered(events)

    def end(self) -> list[Json]:
        """Return the events that end the stream. The last one contains the complete response."""
        events = [] if self._open or self._items else self._begin("msg")
        status = output.status_of(self._finish)
        events += self._close(status)
        response = self._frame.response(status, self._version, self._items, self._usage, self._finish)
        return self._numbered([*events, {"type": f"response.{status}", "response": response}])

    def error(self, error: ApiError) -> list[Json]:
        """Return the event that reports `error` to a client whose stream has already begun."""
        return self._numbered([{"type": "error", "code": error.code, "message": str(error), "param": error.param}])

    def _text_event(self, text: str) -> Json:
        assert self._open is not None
        delta = self._event("delta", delta=text, content_index=0)
        if self._open.kind == "msg":
            self._open.logprobs += self._pending_logprobs
            delta["logprobs"] = self._pending_logprobs
        self._pending_logprobs = []
        return delta

    def _add_call(self, index: int, call: EngineToolCall) -> list[Json]:
        """Append a delta to the arguments of a tool call, and return the events. The input of a custom tool is sent
        once its arguments are complete."""
        events: list[Json] = []
        if self._open is None or self._open.kind not in _CALLS or self._open.call_index != index:
            tool = self._frame.tool(call.function.name)
            is_custom = tool is not None and isinstance(tool.tool, CustomTool)
            events += self._begin("ctc" if is_custom else "fc", call, index, tool)
        assert self._open is not None
        if call.function.arguments:
            self._open.pieces.append(call.function.arguments)
            if self._open.kind == "fc":
                events.append(self._event("delta", delta=call.function.arguments))
        return events

    def _begin(
        self,
        kind: str,
        call: EngineToolCall | None = None,
        index: int | None = None,
        tool: OfferedTool | None = None,
    ) -> list[Json]:
        events = self._close("completed")
        position = len(self._items)
        encrypts = self._frame.encrypts_reasoning
        self._open = _OpenItem(kind, self._frame.item_id(kind, position), position, encrypts, call_index=index)
        self._open.call, self._open.tool = call or EngineToolCall(), tool
        added = self._open.item("in_progress", begun=False)
        events.append({"type": "response.output_item.added", "output_index": position, "item": added})
        if kind not in _CALLS:
            events.append(self._part("added"))
        return events

    def _close(self, status: str) -> list[Json]:
        open_item = self._open
        if open_item is None:
            return []
        item = open_item.item(status, shows_logprobs=self._shows_logprobs)
        if open_item.kind == "fc":
            events = [self._event("done", arguments=item["arguments"], name=item["name"])]
        elif open_item.kind == "ctc":
            events = [self._event("delta", delta=item["input"]), self._event("done", input=item["input"])]
        else:
            event = self._event("done", text=open_item.text, content_index=0)
            if open_item.kind == "msg":
                event["logprobs"] = open_item.logprobs
            events = [event, self._part("done")]
        self._open = None
        self._items.append(item)
        return [*events, {"type": "response.output_item.done", "output_index": open_item.position, "item": item}]

    def _event(self, event: str, /, **fields: object) -> Json:
        assert self._open is not None
        location = {"item_id": self._open.item_id, "output_index": self._open.position}
        return {"type": f"{_PREFIXES[self._open.kind]}.{event}", **location, **fields}

    def _part(self, name: str) -> Json:
        assert self._open is not None
        location = {"item_id": self._open.item_id, "output_index": self._open.position, "content_index": 0}
        return {"type": f"response.content_part.{name}", **location, "part": self._open.part()}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events


_ITEMS: TypeAdapter[tuple[Item, ...]] = TypeAdapter(tuple[Item, ...])


def is_stored(request: ResponsesRequest) -> bool:
    """Return whether the request and its answer are stored, so that later requests may refer to their items."""
    return request.store is not False or request.conversation is not None


class Responses:
    """Answers to one request in the format of `POST /v1/responses`.

    Args:
        parsed: The request.
        responses: The store of responses, or None without one.
    """

    def __init__(self, parsed: ParsedResponses, responses: CallerResponses | None) -> None:
        self._parsed = parsed
        self._responses = responses

    def headers(self, call: ChatCall) -> Mapping[str, str]:
        return answer_headers(call)

    def plain_body(self, call: ChatCall, answer: EngineAnswer) -> bytes:
        writer = self._writer(call)
        writer.add(answer.model, answer.choices, answer.usage, streamed=False)
        response = writer.end()[-1]["response"]
        body = to_json(response)
        self.store(response, body)
        return body

    def streamed(self, call: ChatCall) -> StreamedAnswer:
        return _Events(self, self._writer(call), answer_headers(call))

    def store(self, response: Json, body: bytes) -> None:
        """Store the response for later references, unless the request forbids it, and add its items to the
        conversation of the request. `body` is the response as JSON."""
        request = self._parsed.request
        if self._responses is None or not is_stored(request):
            return
        output = tuple(_ITEMS.validate_python(response["output"]))
        output_ids = tuple(item["id"] for item in response["output"])
        added, item_bytes = self._parsed.added, self._parsed.added_bytes + size_of(output)
        if request.store is not False:
            self._responses.add(
                StoredResponse(
                    response_id=response["id"],
                    body=body,
                    previous_id=request.previous_response_id,
                    input=added,
                    output=output,
                    output_ids=output_ids,
                    item_bytes=item_bytes,
                    conversation_id=request.conversation,
                )
            )
        if request.conversation is not None:
            items = [*named_items(added), *zip(output_ids, output, strict=True)]
            with contextlib.suppress(ApiError):  # the conversation was deleted meanwhile
                self._responses.change(
                    request.conversation, lambda current: current.extended(items, item_bytes, response["id"])
                )

    def _writer(self, call: ChatCall) -> ResponseWriter:
        frame = ResponseFrame(self._parsed, call)
        return ResponseWriter(frame, shows_logprobs=self._parsed.request.shows_logprobs)


class _Events:
    """Encoder of one streamed answer as server-sent events. The last event contains the complete response; no `[DONE]`
    follows."""

    def __init__(self, shape: Responses, writer: ResponseWriter, headers: Mapping[str, str]) -> None:
        self._shape = shape
        self._writer = writer
        self.headers = headers
        self.ping = client_connection.COMMENT

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        return client_connection.encode_typed(self._writer.add(version, chunk.choices, chunk.usage, streamed=True))

    def end(self) -> bytes:
        events = self._writer.end()
        response = events[-1]["response"]
        self._shape.store(response, to_json(response))
        return client_connection.encode_typed(events)

    def error_event(self, error: ApiError) -> bytes:
        return client_connection.encode_typed(self._writer.error(error))


def read_responses(body: bytes, context: RequestContext) -> tuple[ChatRequest, AnswerShape]:
    """Read a body of `POST /v1/responses`."""
    parsed = parse_responses(body, context)
    request = parsed.request
    if is_stored(request):
        context.record = ResponseRecord(
            stored=request.store is not False,
            instructions=bool(request.instructions),
            previous_response_id=request.previous_response_id,
            added_messages=parsed.added_messages,
            conversation=request.conversation,
        )
    return parsed.chat, Responses(parsed, context.responses)
