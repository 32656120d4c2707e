"""One HTTP call to one replica, and the meaning of its failure for the next call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Literal

import aiohttp
from pydantic import ValidationError

from headrace_gateway.access.refusals import CONTEXT_LENGTH_EXCEEDED, ApiError
from headrace_gateway.requests import client_connection
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.settings import UpstreamSettings
from headrace_runtime.process import logs
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_schemas import Replica


class UpstreamCallCancelled(Exception):
    """Raised if the replica hangs and another replica takes over this call."""


class UpstreamCall:
    """One call to one replica. `elsewhere` returns whether another replica could accept the call now."""

    def __init__(self, responded: Callable[[], None], elsewhere: Callable[[], bool]) -> None:
        self.responded = responded
        """Call it whenever bytes came from the replica."""
        self.elsewhere = elsewhere
        self._cut = False
        self._deadline: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def waiting(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Limit each wait for the replica inside the context. Raises `TimeoutError` after `timeout_s`, or
        `UpstreamCallCancelled`."""
        if self._cut:
            raise UpstreamCallCancelled
        try:
            async with asyncio.timeout(timeout_s) as self._deadline:
                yield
        except TimeoutError:
            if self._cut:
                raise UpstreamCallCancelled from None
            raise
        finally:
            self._deadline = None

    def cancel(self) -> None:
        """Cancel the wait for a reply that is under way, or else the next wait as soon as it begins."""
        self._cut = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # the wait has just ended by itself
                self._deadline.reschedule(asyncio.get_running_loop().time())


_RESPONSE_BYTES_MAX = 67_108_864
"""Largest response, or event of a stream, that a replica may send."""
_CONNECT_TIMEOUT_S = 2.0
"""Longest time for connecting to a replica, before the call goes to another one."""

Trouble = Literal["connection", "hung", "full", "version_missing", "aborted", "error"]
_CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError)
_FULL = frozenset((429, 502, 503, 504))
_NOT_THE_CLIENTS_FAULT = frozenset((401, 403, 407))
_ERROR_BYTES_MAX = 65_536
_PROBES_MAX = 64
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ReplicaFailed(Exception):
    """Raised if this replica did not finish the call. Another replica, or the same replica later, may succeed.

    Only the failure `error` (the engine itself failed) is likely to recur. The message contains no text of a user,
    because it is logged.
    """

    def __init__(self, trouble: Trouble, message: str) -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class Engines:
    """HTTP client of all replicas, which is an async context manager."""

    def __init__(self, settings: UpstreamSettings, internal_key: str = "") -> None:
        self._settings = settings
        self._headers = {"content-type": "application/json"}
        if internal_key:
            self._headers["authorization"] = f"Bearer {internal_key}"
        self._session: aiohttp.ClientSession | None = None
        self._workers = WorkerThreads(1)
        self._probes: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Engines:
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=30,
            socket_factory=_watched_socket,  # `limits_total.concurrency` bounds the calls
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
        )
        self._probes = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_PROBES_MAX, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._settings.probe_timeout_s),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in (self._session, self._probes):
            assert session is not None
            await session.close()
        self._workers.close()

    async def answers(self, replica: Replica) -> bool:
        """Return whether the replica answers in time on a new connection. Any status, also 404 or 503, counts."""
        assert self._probes is not None
        try:
            async with self._probes.get(f"{replica.url.rstrip('/')}/health", allow_redirects=False):
                return True
        except (*_CONNECTION_ERRORS, aiohttp.ClientError):
            return False

    async def complete(
        self, replica: Replica, body: bytes, upstream_call: UpstreamCall, headers: Mapping[str, str] = NO_HEADERS
    ) -> EngineAnswer:
        """Return the answer to a call. Raises `ReplicaFailed`, or `ApiError` if the engine refuses the request."""
        async with self._opened(replica, body, upstream_call, headers) as response:
            data = await self._read(response, upstream_call)
        answer = await self._workers.run(len(data), lambda: _parse(data))
        if answer.error is not None:
            raise ReplicaFailed("error", "an error inside an answer")
        if answer.drop_abort():
            raise ReplicaFailed("aborted", "the engine gave up on a choice")
        return answer

    async def stream(
        self, replica: Replica, body: bytes, upstream_call: UpstreamCall, headers: Mapping[str, str] = NO_HEADERS
    ) -> AsyncGenerator[EngineAnswer]:
        """Yield chunks until `[DONE]`. Raises like `complete` at any point. A stream without `[DONE]` has failed."""
        splitter = client_connection.Splitter(_RESPONSE_BYTES_MAX)
        patience_s: float | None = None  # the first tokens may have to wait for a place
        async with self._opened(replica, body, upstream_call, headers) as response:
            while True:
                async with upstream_call.waiting(patience_s):
                    data = await response.content.readany()
                upstream_call.responded()
                patience_s = self._settings.stall_timeout_s
                if not data:
                    raise ReplicaFailed("connection", "the stream ended before its end")
                for event in splitter.feed(data):
                    if event == client_connection.DONE:
                        return
                    chunk = _parse(event)
                    if chunk.error is not None:
                        raise ReplicaFailed("error", "an error inside the stream")
                    aborted = chunk.drop_abort()
                    yield chunk
                    if aborted:
                        raise ReplicaFailed("aborted", "the engine gave up on a choice")

    @contextlib.asynccontextmanager
    async def _opened(
        self, replica: Replica, body: bytes, upstream_call: UpstreamCall, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with status 200. If the context ends early, the connection is closed and the engine stops
        the work."""
        assert self._session is not None
        trace = logs.current_traceparent()
        try:
            async with upstream_call.waiting():
                response = await self._session.post(
                    f"{replica.url.rstrip('/')}/v1/chat/completions",
                    data=body,
                    headers={**headers, "traceparent": trace} if trace else headers,
                    allow_redirects=False,  # the key and the prompt are for this replica alone
                )
            upstream_call.responded()
            async with response:
                if response.status != 200:
                    async with upstream_call.waiting(self._settings.stall_timeout_s):
                        content = await response.content.read(_ERROR_BYTES_MAX)
                    raise _failure(response.status, content)
                yield response
        except UpstreamCallCancelled:
            raise ReplicaFailed("hung", "it neither sends nor answers, and another replica is there") from None
        except _CONNECTION_ERRORS as error:
            raise ReplicaFailed("connection", repr(error)) from error
        except client_connection.EventTooLarge as error:
            raise ReplicaFailed("error", str(error)) from error

    async def _read(self, response: aiohttp.ClientResponse, upstream_call: UpstreamCall) -> bytes:
        chunks: list[bytes] = []
        remaining = _RESPONSE_BYTES_MAX
        while True:
            async with upstream_call.waiting(self._settings.stall_timeout_s):
                chunk = await response.content.readany()
            if not chunk:
                return b"".join(chunks)
            upstream_call.responded()
            chunks.append(chunk)
            remaining -= len(chunk)
            if remaining < 0:
                raise ReplicaFailed("error", "the answer is too large")


def _parse(data: bytes) -> EngineAnswer:
    try:
        return EngineAnswer.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ReplicaFailed("error", f"an answer that is none: {problem['loc']}: {problem['msg']}") from None


def _failure(status: int, body: bytes) -> Exception:
    """Return the error for a status other than 200: another replica may do better, or the request itself is
    impossible."""
    message, code, param = _read_error(body)
    if status in _FULL:
        return ReplicaFailed("full", f"status {status}")
    if status == 404:
        return ReplicaFailed("version_missing", f"status {status}")
    if status >= 500 or status in _NOT_THE_CLIENTS_FAULT:
        return ReplicaFailed("error", f"status {status}")
    if "context length" in message:
        code = CONTEXT_LENGTH_EXCEEDED
    return ApiError(status, code or "invalid_request", message or f"the engine refused with status {status}", param)


def _read_error(body: bytes) -> tuple[str, str | None, str | None]:
    """Return message, code and param of an OpenAI-shaped error. Older vLLM servers omit the outer `error`."""
    try:
        document = json.loads(body)
        inner = document.get("error", document)
        message, code, param = inner.get("message"), inner.get("code"), inner.get("param")
    except (ValueError, AttributeError, RecursionError):
        return "", None, None
    return str(message or ""), code if isinstance(code, str) else None, param if isinstance(param, str) else None


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that detects an unreachable host within half a minute, even while it waits in silence."""
    family, kind, protocol, _, _ = address
    watched = socket.socket(family, kind, protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on every system
            watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return watched
