"""Waits for room on the disk before training or a save begins, so that the disk is never filled to its end."""

from __future__ import annotations

import asyncio

from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import Clock
from headrace_runtime.logs import get_logger

log = get_logger(__name__)
_LOOK_S = 1.0
"""Pause between two looks at a disk without room."""


class DiskRoom:
    """Room on the disk of the blob store. A store that is no folder always has some."""

    def __init__(self, blobs: BlobStore, clock: Clock, free_bytes_min: int | None) -> None:
        self._blobs = blobs
        self._clock = clock
        self._free_bytes_min = free_bytes_min
        self.trouble: str | None = None
        """Why `wait` waits; None while it does not."""

    async def wait(self, next_bytes: int) -> None:
        """Return once `next_bytes` fit and as much stays free as has to."""
        while (
            reason := await asyncio.to_thread(self._blobs.room_trouble, next_bytes, self._free_bytes_min)
        ) is not None:
            if self.trouble is None:
                log.error("training_pauses", error=reason)
            self.trouble = f"training is paused: {reason}"
            await self._clock.sleep(_LOOK_S)
        if self.trouble is not None:
            log.info("training_goes_on")
        self.trouble = None
