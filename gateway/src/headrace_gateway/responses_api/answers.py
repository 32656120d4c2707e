"""How answers of this API are written: see `headrace_gateway.answers`."""

from __future__ import annotations

from pydantic_core import to_json

from headrace_gateway.answers import AnswerShape, StreamedAnswer
from headrace_gateway.chat_call import ChatCall
from headrace_gateway.chat_request import ChatRequest
from headrace_gateway.engine_wire import EngineAnswer
from headrace_gateway.refusals import ApiError
from headrace_gateway.responses_api.events import ResponseWriter, encoded
from headrace_gateway.responses_api.output import ResponseFrame
from headrace_gateway.responses_api.request import ResponsesRequest, parse_responses


class Responses:
    """An `AnswerShape`, for one request."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked

    def whole(self, call: ChatCall, answer: EngineAnswer) -> bytes:
        writer = self._writer(call)
        writer.add(answer.model, answer.choices, answer.usage, streamed=False)
        return to_json(writer.end()[-1]["response"])

    def streamed(self, call: ChatCall) -> StreamedAnswer:
        return _Events(self._writer(call))

    def _writer(self, call: ChatCall) -> ResponseWriter:
        return ResponseWriter(ResponseFrame(self._asked, call), shows_logprobs=self._asked.shows_logprobs)


class _Events:
    """A `StreamedAnswer`. It ends with the event of the whole response; no `[DONE]` follows."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        return encoded(self._writer.add(version, chunk.choices, chunk.usage, streamed=True))

    def end(self) -> bytes:
        return encoded(self._writer.end())

    def broken(self, error: ApiError) -> bytes:
        return encoded(self._writer.error(error))


def read_responses(body: bytes, choices_max: int, values_max: int) -> tuple[ChatRequest, AnswerShape]:
    """See `headrace_gateway.chat.Read`."""
    asked, request = parse_responses(body, choices_max, values_max)
    return request, Responses(asked)
