"""HTTP client for calls to one replica, and the classification of their failures."""

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
    """Raised if a call was cancelled because its replica hangs and another replica takes the call over."""


class UpstreamCall:
    """One call to one replica.

    Args:
        responded: Function to call whenever bytes of the replica arrive.
        elsewhere: Function that returns whether another replica could take over the call now.
    """

    def __init__(self, responded: Callable[[], None], elsewhere: Callable[[], bool]) -> None:
        self.responded = responded
        """Function to call whenever bytes of the replica arrive."""
        self.elsewhere = elsewhere
        self._cut = False
        self._deadline: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def waiting(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Limit each wait for bytes of the replica that happens inside the context.

        Raises:
            TimeoutError: after `timeout_s`.
            UpstreamCallCancelled: `cancel` was called.
        """
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
        """Cancel the present wait for bytes of the replica, or else the next wait as soon as it begins."""
        self._cut = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # the wait has just ended by itself
                self._deadline.reschedule(asyncio.get_running_loop().time())


_RESPONSE_BYTES_MAX = 67_108_864
"""Maximum bytes of a replica's plain response, or of one event of its stream."""
_CONNECT_TIMEOUT_S = 2.0
"""Maximum seconds for connecting to a replica, before the call is sent to another one."""

Trouble = Literal["connection", "hung", "full", "version_missing", "aborted", "error"]
_CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError)
_FULL = frozenset((429, 502, 503, 504))
_NOT_THE_CLIENTS_FAULT = frozenset((401, 403, 407))
_ERROR_BYTES_MAX = 65_536
_PROBES_MAX = 64
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ReplicaFailed(Exception):
    """Raised if a replica did not finish a call. Another replica may succeed, or the same replica later.

    Only after the failure `error` (the engine itself failed) is a repetition likely to fail again. The message contains
    no text of a user, because it is logged.
    """

    def __init__(self, trouble: Trouble, message: str) -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class Engines:
    """HTTP client for the calls to all replicas. It is an async context manager."""

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
        """Return whether the replica responds in time to `GET /health` on a new connection. Any status counts, also 404
        or 503."""
        assert self._probes is not None
        try:
            async with self._probes.get(f"{replica.url.rstrip('/')}/health", allow_redirects=False):
                return True
        except (*_CONNECTION_ERRORS, aiohttp.ClientError):
            return False

    async def complete(
        self, replica: Replica, body: bytes, upstream_call: UpstreamCall, headers: Mapping[str, str] = NO_HEADERS
    ) -> EngineAnswer:
        """Send a call and return its plain answer. Raises `ReplicaFailed`, or `ApiError` if the engine refuses the
        request."""
        async with self._open_response(replica, body, upstream_call, headers) as response:
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
        """Send a call and yield the chunks of its answer until `[DONE]`. Raises like `complete` at any point, also if
        the stream ends without `[DONE]`."""
        splitter = client_connection.Splitter(_RESPONSE_BYTES_MAX)
        timeout_s: float | None = None  # before the first token: the call may wait in the replica's queue
        async with self._open_response(replica, body, upstream_call, headers) as response:
            while True:
                async with upstream_call.waiting(timeout_s):
                    data = await response.content.readany()
                upstream_call.responded()
                timeout_s = self._settings.stall_timeout_s
                if not data:
                    raise ReplicaFailed("connection", "the stream ended without [DONE]")
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
    async def _open_response(
        self, replica: Replica, body: bytes, upstream_call: UpstreamCall, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield the response if its status is 200. If the context is left early, the connection is
        closed, by which the engine notices that it must stop."""
        assert self._session is not None
        trace = logs.current_traceparent()
        try:
            async with upstream_call.waiting():
                response = await self._session.post(
                    f"{replica.url.rstrip('/')}/v1/chat/completions",
                    data=body,
                    headers={**headers, "traceparent": trace} if trace else headers,
                    allow_redirects=False,  # only this replica may receive the key and the prompt
                )
            upstream_call.responded()
            async with response:
                if response.status != 200:
                    async with upstream_call.waiting(self._settings.stall_timeout_s):
                        content = await response.content.read(_ERROR_BYTES_MAX)
                    raise _failure(response.status, content)
                yield response
        except UpstreamCallCancelled:
            raise ReplicaFailed(
                "hung", "it sends no bytes and fails health checks, and another replica can take the call"
            ) from None
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
        raise ReplicaFailed("error", f"the answer cannot be parsed: {problem['loc']}: {problem['msg']}") from None


def _failure(status: int, body: bytes) -> Exception:
    """Return the error for a status other than 200: `ReplicaFailed` if another replica may succeed, else `ApiError` for
    the client."""
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
    """Return message, code and param of an error body in OpenAI's format. Older vLLM servers omit the outer `error`."""
    try:
        document = json.loads(body)
        inner = document.get("error", document)
        message, code, param = inner.get("message"), inner.get("code"), inner.get("param")
    except (ValueError, AttributeError, RecursionError):
        return "", None, None
    return str(message or ""), code if isinstance(code, str) else None, param if isinstance(param, str) else None


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with TCP options by which an unreachable host is detected within half a minute, even if no bytes
    are exchanged."""
    family, kind, protocol, _, _ = address
    tcp_socket = socket.socket(family, kind, protocol)
    tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on every system
            tcp_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return tcp_socket
