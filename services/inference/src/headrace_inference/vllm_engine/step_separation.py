"""Keeps two kinds of requests of one engine core apart.

Where a step holds a request with `logprob_token_ids`, vLLM (0.32) gives every other row of the step its sampled token
alone: requests that asked for the most likely tokens would get none of them. So a probe waits until nobody with
`top_logprobs` is being answered, and whoever comes with them meanwhile waits for the probe, which takes a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class StepSeparation:
    """Of one engine core. Used in the event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._ranked = 0
        self._probes = 0
        self._probes_waiting = 0

    @contextlib.asynccontextmanager
    async def ranked(self, wanted: bool) -> AsyncIterator[None]:
        """While a request is answered; `wanted`: it asks for the most likely tokens."""
        if not wanted:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._probes and not self._probes_waiting)
            self._ranked += 1
        try:
            yield
        finally:
            self._ranked -= 1
            await self._tell()

    @contextlib.asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        """While a version is probed."""
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
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
