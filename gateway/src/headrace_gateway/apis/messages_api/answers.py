"""The shape of the answers of this API, and the readers of its requests."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic_core import to_json

from headrace_gateway.access.refusals import REQUEST_ID_HEADER, ApiError
from headrace_gateway.apis.answers import AnswerShape, StreamedAnswer, answer_headers
from headrace_gateway.apis.messages_api.events import MessageWriter
from headrace_gateway.apis.messages_api.request import MessagesRequest, parse_messages
from headrace_gateway.requests import client_connection
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.requests.request_context import RequestContext


class Messages:
    """The answers to one request of `POST /v1/messages`."""

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
    """One streamed answer."""

    def __init__(self, writer: MessageWriter, headers: Mapping[str, str]) -> None:
        self._writer = writer
        self.headers = headers
        self.ping = client_connection.encode_typed([{"type": "ping"}])

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        return client_connection.encode_typed(self._writer.add(chunk, version, streamed=True))

    def end(self) -> bytes:
        return client_connection.encode_typed(self._writer.end())

    def broken(self, error: ApiError) -> bytes:
        return client_connection.encode(error.anthropic_body(self.headers[REQUEST_ID_HEADER]), "error")


def read_messages(body: bytes, context: RequestContext) -> tuple[ChatRequest, AnswerShape]:
    """Read a body of `POST /v1/messages`."""
    request, chat_request = parse_messages(body, context)
    return chat_request, Messages(request)
