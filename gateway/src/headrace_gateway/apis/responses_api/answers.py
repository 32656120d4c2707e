"""The shape of the answers of this API, and the reader of its requests."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from pydantic import TypeAdapter
from pydantic_core import to_json

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.answers import AnswerShape, StreamedAnswer, answer_headers
from headrace_gateway.apis.responses_api.events import ResponseWriter
from headrace_gateway.apis.responses_api.items import Item, size_of
from headrace_gateway.apis.responses_api.output import Json, ResponseFrame
from headrace_gateway.apis.responses_api.request import ParsedResponses, ResponsesRequest, parse_responses
from headrace_gateway.requests import client_connection
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.requests.request_context import RequestContext
from headrace_gateway.requests.response_store import CallerResponses, StoredResponse, named_items
from headrace_schemas.events.turn import ResponseRecord

_ITEMS: TypeAdapter[tuple[Item, ...]] = TypeAdapter(tuple[Item, ...])


def is_stored(request: ResponsesRequest) -> bool:
    """Return whether later requests may refer to the items of a request and of its answer."""
    return request.store is not False or request.conversation is not None


class Responses:
    """The answers to one request of `POST /v1/responses`.

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
    """One streamed answer. The stream ends with the event of the whole response, without `[DONE]`."""

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

    def broken(self, error: ApiError) -> bytes:
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
