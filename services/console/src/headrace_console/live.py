"""Server-sent events that announce changed pages.

An event has the name `changed` and data such as `loop 1712`: a topic and its number of changes. It does not contain the
change itself: the browser requests the changed part of its page with its own session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace_console.metrics import TABS
from headrace_runtime.errors import Refused

_SUBSCRIBERS_MAX = 200
_INTERVAL_S = 1.0
_SILENCE_S = 15.0


class Changes:
    """Change counters by topic, and the event streams to browsers. Each stream sends at most one message per second."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._wakers: set[asyncio.Event] = set()
        self._is_closed = False

    @property
    def is_watched(self) -> bool:
        """Whether a browser follows the changes."""
        return bool(self._wakers)

    def announce(self, topic: str) -> None:
        """Count a change of a topic, and wake the streams of all subscribers."""
        self._numbers[topic] = self._numbers.get(topic, 0) + 1
        for waker in self._wakers:
            waker.set()

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._is_closed = True
        for waker in self._wakers:
            waker.set()

    def stream(self) -> AsyncIterator[bytes]:
        """Open an event stream for a new subscriber, which gets all later changes. Raises `Refused` 503 beyond 200
        streams.
        """
        if len(self._wakers) >= _SUBSCRIBERS_MAX:
            raise Refused(503, "too_many_streams", f"{_SUBSCRIBERS_MAX} tabs follow the changes; close one of them")
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        waker = asyncio.Event()
        self._wakers.add(waker)
        TABS.set(len(self._wakers))
        sent = dict(self._numbers)
        try:
            yield b"retry: 2000\n\n"
            while not self._is_closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(waker.wait(), _SILENCE_S)
                waker.clear()
                changed = {topic: number for topic, number in self._numbers.items() if sent.get(topic) != number}
                sent |= changed
                yield _messages(changed)
                if changed and not self._is_closed:
                    await asyncio.sleep(_INTERVAL_S)
        finally:
            self._wakers.discard(waker)
            TABS.set(len(self._wakers))


def _messages(changed: dict[str, int]) -> bytes:
    """Return the events of changed topics, or a comment that keeps the connection open."""
    if not changed:
        return b": alive\n\n"
    return "".join(f"event: changed\ndata: {topic} {number}\n\n" for topic, number in changed.items()).encode()
