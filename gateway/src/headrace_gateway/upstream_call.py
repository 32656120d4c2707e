"""One call to one replica, which can be cancelled so that it moves to another replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class UpstreamCallCancelled(Exception):
    """The replica hangs, and another replica takes over this call."""


class UpstreamCall:
    """One call at one replica. `elsewhere` returns whether another replica could take the call now."""

    def __init__(self, responded: Callable[[], None], elsewhere: Callable[[], bool]) -> None:
        self.responded = responded
        """Call it whenever bytes came from the replica."""
        self.elsewhere = elsewhere
        self._cut = False
        self._deadline: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def waiting(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wraps each wait for the replica. Raises `TimeoutError` after `timeout_s`, or `UpstreamCallCancelled`."""
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
        """End the wait: the present one, or the next one when it begins."""
        self._cut = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # the wait has just ended by itself
                self._deadline.reschedule(asyncio.get_running_loop().time())
