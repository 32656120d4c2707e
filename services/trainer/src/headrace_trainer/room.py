"""Waits for free space on the disk before training or a save begins, so that the disk is never full."""

from __future__ import annotations

import asyncio

from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.blobs import BlobStore

log = get_logger(__name__)
_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of a full disk."""


class DiskRoom:
    """Free space on the disk of the blob store. A store that is no folder always has enough."""

    def __init__(self, blobs: BlobStore, clock: Clock, free_bytes_min: int | None) -> None:
        self._blobs = blobs
        self._clock = clock
        self._free_bytes_min = free_bytes_min
        self.trouble: str | None = None
        """The reason why `wait` waits, or None while it does not."""

    async def wait(self, next_bytes: int) -> None:
        """Return once `next_bytes` fit and the required minimum stays free."""
        while (
            reason := await asyncio.to_thread(self._blobs.space_problem, next_bytes, self._free_bytes_min)
        ) is not None:
            if self.trouble is None:
                log.error("training_pauses", error=reason)
            self.trouble = f"training is paused: {reason}"
            await self._clock.sleep(_CHECK_INTERVAL_S)
        if self.trouble is not None:
            log.info("training_goes_on")
        self.trouble = None
