"""Responses to clients that may disconnect at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return None.

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
            await unless_disconnected(receive, self._send(send))
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
