"""The end offsets of the logs at the time of a feedback. They order feedback and turns without clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiokafka.partitioner import murmur2

from headrace_runtime.kafka.consumer import Offsets
from headrace_schemas import Trajectory, Turn

TOPICS = (Turn.topic, Trajectory.topic)
Ends = Mapping[str, Mapping[int, int]]


class LogEnds:
    """Reads end offsets from the bus. Callers that come during a request share the next request, so an answer is
    never older than its request."""

    def __init__(self, offsets: Offsets) -> None:
        self._offsets = offsets
        self._pending: asyncio.Task[Ends] | None = None
        self._next: asyncio.Task[Ends] | None = None

    async def start(self) -> None:
        """Raises `Unavailable` when the bus does not answer."""
        await self._offsets.start()

    async def stop(self) -> None:
        await self._offsets.stop()

    async def ends(self) -> Ends:
        """Topic to the end of each partition. Raises `Unavailable`."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask(self._pending))
            self._next.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Task[Ends] | None) -> Ends:
        if before is not None:
            await asyncio.wait([before])
        self._pending, self._next = self._next, None
        return {topic: await self._offsets.ends(topic) for topic in TOPICS}


def _retrieve_error(task: asyncio.Task[Ends]) -> None:
    """The caller may have gone meanwhile."""
    if not task.cancelled():
        task.exception()


def after(ends: Ends, key: str) -> Mapping[str, int]:
    """The ends of the partitions of `key`."""
    hashed = murmur2(key.encode()) & 0x7FFFFFFF
    return {topic: offsets[hashed % len(offsets)] for topic, offsets in ends.items() if offsets}
