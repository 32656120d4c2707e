"""The thread on which one call hangs while a replica serves it: bytes come through it, and it can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Cut(Exception):
    """The replica hangs, and this call is better off elsewhere."""


class Line:
    """One call at one replica. `elsewhere` tells whether another replica could take the call now."""

    def __init__(self, heard: Callable[[], None], elsewhere: Callable[[], bool]) -> None:
        self.heard = heard
        """To be called whenever anything came from the replica."""
        self.elsewhere = elsewhere
        self._cut = False
        self._deadline: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def waiting(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Around each wait for the replica. Raises `TimeoutError` after `timeout_s`, `Cut` when the line is cut."""
        if self._cut:
            raise Cut
        try:
            async with asyncio.timeout(timeout_s) as self._deadline:
                yield
        except TimeoutError:
            if self._cut:
                raise Cut from None
            raise
        finally:
            self._deadline = None

    def cut(self) -> None:
        """End the wait, now or when it begins."""
        self._cut = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # it has just passed by itself
                self._deadline.reschedule(asyncio.get_running_loop().time())
