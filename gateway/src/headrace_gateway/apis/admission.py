"""The first steps of every endpoint: identify the caller, check scope and limits, read the body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import Receive, Scope

from headrace_gateway.access.keys import Caller, KeyRing
from headrace_gateway.access.limits import RequestLimits
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.capture.publisher import Publisher
from headrace_gateway.requests import http_request
from headrace_gateway.requests.http_request import headers_of, read_body
from headrace_gateway.settings import Scope as KeyScope
from headrace_runtime.errors import Unavailable
from headrace_runtime.http.connections import mark_authenticated
from headrace_runtime.http.protocol import BODY_TIMEOUT_S
from headrace_runtime.process import logs
from headrace_schemas import Event, Feedback
from headrace_schemas.values.ids import decode_name

_TURNS = 8
_ENVELOPE_BYTES = 500
"""Estimated bytes of an event on the log beyond those of its request."""


_VALUES_PER_REQUEST = 8
"""Values of feedback that count as one request. The scorer stores and publishes a reward for each value."""
_LISTED_PER_REQUEST = 64
"""Responses of feedback with one value that count as one request: most such lists are whole runs, with one reward."""


def _requests_of(event: Event) -> int:
    if not isinstance(event, Feedback):
        return 1
    is_about_a_run = event.level is None and not event.parts
    return max(1, event.value_count // (_LISTED_PER_REQUEST if is_about_a_run else _VALUES_PER_REQUEST))


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request whose key, size and rate limits were checked, with its caller and body."""

    caller: Caller
    headers: Mapping[bytes, bytes]
    body: bytes


@dataclass(frozen=True, slots=True)
class Admission:
    """Checks of key, rate and size, and publishing of events, for all endpoints that accept a body."""

    keys: KeyRing
    limits: RequestLimits
    publisher: Publisher
    _turns: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    def caller(self, scope: Scope, headers: Mapping[bytes, bytes], required_scope: KeyScope) -> Caller:
        """Return the caller of the request, after checking its scope and its session. Raises `ApiError` 401 or 403."""
        caller = self.keys.identify(scope.get(http_request.KEY), headers)
        if not caller.is_anonymous:
            mark_authenticated(scope)
        caller.require_scope(required_scope)
        if caller.session_id is not None:
            header = headers.get(b"x-session-id")
            caller.check_session(None if header is None else decode_name(header), "X-Session-Id")
            caller.check_session(scope.get(http_request.SESSION), "the session in the path")
        return caller

    @contextlib.asynccontextmanager
    async def enter(self, scope: Scope, receive: Receive, required_scope: KeyScope) -> AsyncIterator[AdmittedRequest]:
        """Check the caller and the limits, read the body, and yield both. Inside the context the request counts as in
        progress and belongs to the trace of its `traceparent`. Raises `ApiError`."""
        headers = headers_of(scope)
        caller = self.caller(scope, headers, required_scope)
        with self.limits.admit(caller), logs.span(headers.get(b"traceparent", b"").decode("latin-1")):
            self.publisher.admit(caller.tenant)
            body = await self._body(headers, receive, caller.limits.body_bytes_max)
            async with contextlib.nullcontext() if required_scope == "chat" else self._turn(caller.tenant):
                yield AdmittedRequest(caller, headers, body)

    def _turn(self, tenant: str) -> asyncio.Semaphore:
        """Return the semaphore that bounds how many feedback and trajectory requests of a tenant are processed at a
        time.

        The event loop stays free for other calls. There is one semaphore for each configured tenant.
        """
        return self._turns.setdefault(tenant, asyncio.Semaphore(_TURNS))

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive, bytes_max: int) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await read_body(headers, receive, bytes_max)
        except TimeoutError:
            message = f"the request body took longer than {BODY_TIMEOUT_S:g} s"
            raise ApiError(408, "body_timeout", message) from None

    async def publish_many(
        self, caller: Caller, events: Sequence[Event], *, size_bytes: int = 0, copies: int = 1
    ) -> None:
        """Publish the events of one request of `size_bytes`, each `copies` times.

        Each copy is charged as a request and as stored bytes, and many values of feedback as several
        requests. Raises `ApiError` 429 or 503.
        """
        self.limits.charge(caller, copies * sum(map(_requests_of, events)))
        await self.publish(*events)
        self.limits.store(caller.tenant, (size_bytes + len(events) * _ENVELOPE_BYTES) * copies)

    async def publish(self, *events: Event) -> None:
        """Publish `events`, and return once they are durable. Raises `ApiError` 503."""
        try:
            await self.publisher.publish(*events)
        except Unavailable as error:
            message = f"neither the bus nor the spool took this ({error}); it was withdrawn, send it again"
            raise ApiError(503, "not_recorded", message, retry_after_s=5) from error
