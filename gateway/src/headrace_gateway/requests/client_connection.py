"""Connection to the client of one request: sending, server-sent events, and detection of disconnects.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.types import Receive, Send

DONE = b"[DONE]"
COMMENT = b": keep-alive\n\n"
"""Comment of a server-sent event stream, which clients skip. It keeps a silent connection open."""
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""U+2028, U+2029 and U+0085 in UTF-8, with their JSON escapes."""


class ClientConnection:
    """Connection to the client of one request. `watch_disconnect` must be entered after the request body has been
    read."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.disconnected = False
        """The client disconnected before the response ended. Later writes are dropped without an error."""
        self.started = False
        """The status was sent. Later errors can only be reported in the body."""
        self._has_written = False

    @contextlib.asynccontextmanager
    async def watch_disconnect(self, on_gone: Callable[[], None]) -> AsyncIterator[None]:
        """Watch the connection inside the context. After a disconnect, set `disconnected` and call `on_gone` once."""
        watch = asyncio.create_task(self._until_gone(on_gone))
        try:
            yield
        finally:
            watch.cancel()

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def body(self, data: bytes, *, more: bool = False) -> None:
        self._has_written = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @contextlib.asynccontextmanager
    async def keep_alive(self, ping: bytes, interval_s: float) -> AsyncIterator[None]:
        """Send `ping` inside the context whenever a stream that has begun was silent for `interval_s`."""
        pings = asyncio.create_task(self._ping(ping, interval_s)) if ping else None
        try:
            yield
        finally:
            if pings is not None:
                pings.cancel()

    async def _ping(self, ping: bytes, interval_s: float) -> None:
        while True:
            self._has_written = False
            await asyncio.sleep(interval_s)
            if self.started and not self._has_written:
                await self.body(ping, more=True)

    async def _until_gone(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # after the complete body, only the disconnect follows
        self.disconnected = True
        on_gone()


class EventTooLarge(Exception):
    """Raised by `Splitter.feed` for an event that is larger than `event_bytes_max`."""


class Splitter:
    """Incremental parser of server-sent events. It skips comments and all fields except `data`."""

    def __init__(self, event_bytes_max: int) -> None:
        self._rest = b""
        self._max = event_bytes_max

    def feed(self, data: bytes) -> list[bytes]:
        """Append bytes, and return the data of each event that is complete now. Raises `EventTooLarge`."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > self._max:
            raise EventTooLarge(f"an event is larger than {self._max} bytes")
        return [payload for event in events if (payload := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def encode_event(data: bytes, kind: str = "") -> bytes:
    """Return the bytes of one server-sent event.

    Args:
        data: the payload, JSON without newlines. Unicode's line separators in its strings are escaped, because some
            clients split events at them.
        kind: event type for a line `event:`, which the APIs of Anthropic and of Responses require; empty for no such
            line.
    """
    for separator, escaped in _SEPARATORS:
        if separator in data:
            data = data.replace(separator, escaped)
    named = b"event: %b\n" % kind.encode() if kind else b""
    return named + b"data: " + data + b"\n\n"


def encode_typed(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Return `events` encoded in order, with the field `type` as their kind."""
    return b"".join(encode_event(to_json(event), event["type"]) for event in events)
