"""The client's end of one request: sending to it, and noticing when it has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.types import Receive, Send


class ClientConnection:
    """`watched` begins once the request body has been read."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.disconnected = False
        """The client disconnected before the response ended. Later writes are dropped without an error."""
        self.started = False
        """The status was sent. Later errors can only be reported in the body."""
        self._has_written = False

    @contextlib.asynccontextmanager
    async def watched(self, on_gone: Callable[[], None]) -> AsyncIterator[None]:
        """Watches the connection while the body runs: sets `disconnected`, and calls `on_gone` once."""
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
    async def pinged(self, ping: bytes, interval_s: float) -> AsyncIterator[None]:
        """Send `ping` while the body runs, whenever a stream that has begun was silent for `interval_s`."""
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
            pass  # nothing else follows a whole body
        self.disconnected = True
        on_gone()
