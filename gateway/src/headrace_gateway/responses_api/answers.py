"""The shape of this API's answers (`headrace_gateway.answers`), and its reader (`headrace_gateway.chat.Read`)."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter
from pydantic_core import to_json

from headrace_gateway import sse
from headrace_gateway.answers import AnswerShape, StreamedAnswer, answer_headers
from headrace_gateway.chat_call import ChatCall
from headrace_gateway.chat_request import ChatRequest
from headrace_gateway.engine_wire import EngineAnswer
from headrace_gateway.refusals import ApiError
from headrace_gateway.request_context import RequestContext
from headrace_gateway.response_store import CallerResponses, StoredResponse
from headrace_gateway.responses_api.events import ResponseWriter
from headrace_gateway.responses_api.items import Item
from headrace_gateway.responses_api.output import Json, ResponseFrame
from headrace_gateway.responses_api.request import ParsedResponses, parse_responses

_OUTPUT: TypeAdapter[Item] = TypeAdapter(Item)


class Responses:
    """The answers to one request of `POST /v1/responses`.

    Args:
        parsed: The request.
        responses: The store of responses, or None without one.
        size_bytes: The size of the request's body.
    """

    def __init__(self, parsed: ParsedResponses, responses: CallerResponses | None, size_bytes: int) -> None:
        self._parsed = parsed
        self._responses = responses
        self._size_bytes = size_bytes

    def headers(self, call: ChatCall) -> Mapping[str, str]:
        return answer_headers(call)

    def plain_body(self, call: ChatCall, answer: EngineAnswer) -> bytes:
        writer = self._writer(call)
        writer.add(answer.model, answer.choices, answer.usage, streamed=False)
        response = writer.end()[-1]["response"]
        body = to_json(response)
        self.store(response, len(body))
        return body

    def streamed(self, call: ChatCall) -> StreamedAnswer:
        return _Events(self, self._writer(call), answer_headers(call))

    def store(self, response: Json, size_bytes: int) -> None:
        """Store the response for later references, unless the request forbids it."""
        if self._responses is None or self._parsed.request.store is False:
            return
        items = tuple(_OUTPUT.validate_python(item) for item in response["output"])
        self._responses.add(StoredResponse(response, self._parsed.items, items, self._size_bytes + size_bytes))

    def _writer(self, call: ChatCall) -> ResponseWriter:
        frame = ResponseFrame(self._parsed, call)
        return ResponseWriter(frame, shows_logprobs=self._parsed.request.shows_logprobs)


class _Events:
    """One streamed answer. The stream ends with the event of the whole response, without `[DONE]`."""

    def __init__(self, shape: Responses, writer: ResponseWriter, headers: Mapping[str, str]) -> None:
        self._shape = shape
        self._writer = writer
        self.headers = headers
        self.ping = sse.COMMENT

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        return sse.encode_typed(self._writer.add(version, chunk.choices, chunk.usage, streamed=True))

    def end(self) -> bytes:
        events = self._writer.end()
        data = sse.encode_typed(events)
        self._shape.store(events[-1]["response"], len(data))
        return data

    def broken(self, error: ApiError) -> bytes:
        return sse.encode_typed(self._writer.error(error))


def read_responses(body: bytes, context: RequestContext) -> tuple[ChatRequest, AnswerShape]:
    """Read a body of `POST /v1/responses`."""
    parsed = parse_responses(body, context)
    return parsed.chat, Responses(parsed, context.responses, len(body))
