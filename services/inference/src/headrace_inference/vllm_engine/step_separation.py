"""Separation of probes from requests with `top_logprobs` in one engine core.

If one request of a step has `logprob_token_ids`, vLLM (0.32) returns only the sampled token's logprob for all other
requests of the step, so requests with `top_logprobs` would get no top logprobs. So a probe waits until no such request
is running, and such requests wait while a probe runs, which takes about a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class StepSeparation:
    """Lock between probes and requests with `top_logprobs` of one engine core. Used in the event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._ranked = 0
        self._probes = 0
        self._probes_waiting = 0

    @contextlib.asynccontextmanager
    async def answering(self, top_logprobs: bool) -> AsyncIterator[None]:
        """Enclose the answer to a request. With `top_logprobs`, wait first until no probe runs or waits."""
        if not top_logprobs:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._probes and not self._probes_waiting)
            self._ranked += 1
        try:
            yield
        finally:
            self._ranked -= 1
            await self._notify()

    @contextlib.asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        """Enclose a probe. Wait first until no request with `top_logprobs` runs."""
        self._probes_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._ranked)
                self._probes += 1
        finally:
            self._probes_waiting -= 1
        try:
            yield
        finally:
            self._probes -= 1
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
