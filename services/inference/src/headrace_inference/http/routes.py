"""HTTP interface of one replica, whose clients may disconnect at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace_inference import metrics
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Share
from headrace_inference.errors import EngineFailed, Overloaded
from headrace_inference.http.completions import Completions
from headrace_inference.http.wire import ChatRequest, parse
from headrace_runtime.errors import Refused
from headrace_runtime.http import web
from headrace_runtime.process import logs
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.settings.sections import Common
from headrace_schemas.http.replica_api import BACKGROUND, PURPOSE_HEADER, SESSION_HEADER, ScoredAnswers, ScoreRequest

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` and return its result. If the client disconnects first, cancel `work` and return None.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    disconnection = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnection), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, disconnection):
            task.cancel()
        await asyncio.gather(working, disconnection, return_exceptions=True)


class EventStream(Response):
    """Response of server-sent events. `close` is called when the response ends, for any reason."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_SESSION_LENGTH_MAX = 64


@dataclass(frozen=True)
class ReadyVersion:
    """A loaded version with everything that a request needs: tokenizer, context length and time of loading."""

    version: str
    tokenizer: ChatTokenizer
    context_tokens: int
    loaded_at_s: int
    parent: str | None


class Versions(Protocol):
    """Interface by which the HTTP routes look up the versions on this replica."""

    def serving_versions(self) -> Sequence[ReadyVersion]:
        """Return all versions that answer now."""

    def find_version(self, model: str) -> ReadyVersion:
        """Return an exact version, or the only ready version of a model. Raises `UnknownVersion`."""


@dataclass(frozen=True)
class RequestBounds:
    """Bounds of one request."""

    body_bytes_max: int
    choices_max: int
    json_values_max: int


class Api:
    """Routes `/v1/chat/completions`, `/v1/models` and `/v1/logprobs`, besides the pages that every service has."""

    def __init__(
        self,
        common: Common,
        versions: Versions,
        completions: Completions,
        limits: RequestBounds,
        worker_threads: WorkerThreads,
    ) -> None:
        self._common = common
        self._versions = versions
        self._completions = completions
        self._limits = limits
        self._worker_threads = worker_threads

    def app(self, checks: Mapping[str, web.Check]) -> Starlette:
        """Return the application. `checks` are its readiness checks."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/logprobs", self._logprobs, methods=["POST"]),
        ]
        application = web.app(checks, routes, self._common, needs_disk=False)
        for kind in (Refused, Overloaded, EngineFailed, HTTPException, Exception):
            application.add_exception_handler(kind, _answer_error)
        return application

    async def _models(self, request: Request) -> Response:
        web.require_internal_key(request, self._common)
        listed = [
            {
                "id": served.version,
                "object": "model",
                "created": served.loaded_at_s,
                "owned_by": "headrace",
                "parent": served.parent,
                "max_model_len": served.context_tokens,
            }
            for served in self._versions.serving_versions()
        ]
        return JSONResponse({"object": "list", "data": listed})

    async def _logprobs(self, request: Request) -> Response:
        """Handle `POST /v1/logprobs`: return the logprobs of given answers under one version
        (`headrace_schemas.http.replica_api`).
        """
        web.require_internal_key(request, self._common)
        body = await _body(request, self._limits.body_bytes_max)
        score_request = await self._worker_threads.run(len(body), partial(_score_request, body))
        served = self._versions.find_version(score_request.model)
        logprobs = await self._completions.score(served.version, score_request.answers)
        metrics.REQUESTS.labels("200").inc()
        scored = ScoredAnswers(logprobs=tuple(tuple(answer) for answer in logprobs))
        return Response(scored.model_dump_json(), media_type="application/json")

    async def _chat(self, request: Request) -> Response:
        web.require_internal_key(request, self._common)
        with logs.span(request.headers.get("traceparent")):
            body = await _body(request, self._limits.body_bytes_max)
            chat = await self._worker_threads.run(len(body), partial(self._parse, body))
            served = self._versions.find_version(chat.model)
            completion = await self._completions.begin(
                chat, served.version, served.tokenizer, len(body), _share_of(request)
            )
        if chat.stream:
            metrics.REQUESTS.labels("200").inc()
            options = chat.stream_options
            events = completion.stream(include_usage=options is not None and options.include_usage)
            return EventStream(events, completion.close)
        try:
            answer = await run_until_disconnect(request.receive, completion.complete())
        finally:
            completion.close()
        if answer is None:
            metrics.REQUESTS.labels("499").inc()
            return Response(status_code=499)  # the client has disconnected
        metrics.REQUESTS.labels("200").inc()
        return Response(answer, media_type="application/json")

    def _parse(self, body: bytes) -> ChatRequest:
        return parse(body, self._limits.choices_max, self._limits.json_values_max)


def _share_of(request: Request) -> Share:
    """Return the fairness key of a call with session and purpose from the gateway's headers, without the tenant's salt.

    The salt is in the body of the request. `headrace_schemas.http.replica_api` describes the headers.
    """
    session = web.header_of(request, SESSION_HEADER)[:_SESSION_LENGTH_MAX]
    return Share(session=session, background=web.header_of(request, PURPOSE_HEADER) == BACKGROUND)


def _score_request(body: bytes) -> ScoreRequest:
    """Parse the body of a request for logprobs. Raises `Refused`."""
    try:
        return ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, problem["loc"])) or "body"
        raise Refused(400, "invalid_value", f"{field}: {problem['msg']}", field) from None


async def _body(request: Request, limit: int) -> bytes:
    """Read the body of a request. Raises `Refused` as soon as it is larger than `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Refused(413, "body_too_large", f"the request body is larger than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def _answer_error(_request: Request, error: Exception) -> Response:
    """Return the response for an error in OpenAI's format. Unexpected errors reveal no details."""
    status, code, param, message = 500, "internal_error", None, "internal error"
    headers = {}
    if isinstance(error, Refused):
        status, code, param, message = error.status, error.code, error.param, str(error)
    elif isinstance(error, EngineFailed):
        code, message = "engine_failed", str(error)
    elif isinstance(error, HTTPException):
        status, code, message = error.status_code, "not_found", error.detail
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    metrics.REQUESTS.labels(str(status)).inc()
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": param}}
    return JSONResponse(body, status, headers)
