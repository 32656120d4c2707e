"""Read new records of topics, and the trajectory of a session. Needs the extra `headrace-client[topics]`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from typing import TypeVar

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.topics import Range, Topics, connected
from headrace_schemas import Event, Trajectory
from headrace_schemas.values import ids
from headrace_schemas.values.ids import decode_name

E = TypeVar("E", bound=Event)
_POLL_S = 0.1


class Follower:
    """Reader of new records. It starts at the beginning of each topic, or, after `begin`, at the end offsets at that
    time."""

    def __init__(self, *topics: str) -> None:
        self._next_offsets: dict[str, dict[int, int]] = {topic: {} for topic in topics}

    async def begin(self, topics: Topics) -> None:
        """Skip all records that are on the topics now."""
        self._next_offsets = await topics.ends(list(self._next_offsets))

    async def events(self, topics: Topics, kind: type[E], keys: Collection[str] = ()) -> AsyncIterator[E]:
        """Yield the new events of one type. Records without a valid event are skipped, because their consumer
        dead-letters them."""
        async for unread, end in self._ranges(topics, kind.topic, keys):
            async for entry in topics.read(unread, ends=end):
                if isinstance(entry.event, kind):
                    yield entry.event

    async def keys(self, topics: Topics, topic: str) -> AsyncIterator[str]:
        """Yield the keys of new records without decoding their values."""
        async for unread, end in self._ranges(topics, topic, ()):
            async for record in topics.records(unread, ends=end):
                yield decode_name(record.key or b"")

    async def _ranges(
        self, topics: Topics, topic: str, keys: Collection[str]
    ) -> AsyncIterator[tuple[Range, dict[int, int]]]:
        """Yield the unread range of each partition. The offset advances once the caller has read the range."""
        at = self._next_offsets[topic]
        for partition, end in (await topics.ends([topic]))[topic].items():
            start = at.setdefault(partition, 0)
            if end > start:
                yield Range(topic, partitions=[partition], from_offset=start, keys=keys), {partition: end}
                at[partition] = end


def newest_trajectory(bus: str, session_id: str, *, tenant: str = "default", timeout_s: float = 30.0) -> Trajectory:
    """Return the newest trajectory of a session, waiting for a session that has just ended.

    Raises:
        UsageError: there is no trajectory within `timeout_s`.
    """
    return blocking(find_trajectory(bus, session_id, tenant, timeout_s))


async def find_trajectory(bus: str, session_id: str, tenant: str, timeout_s: float) -> Trajectory:
    """Return the newest trajectory of a session as `newest_trajectory` does, on an event loop."""
    key, follower, trajectory = ids.session_key(tenant, session_id), Follower(Trajectory.topic), None
    deadline = time.monotonic() + timeout_s
    async with connected(bus) as topics:
        while True:
            async for event in follower.events(topics, Trajectory, keys=[key]):
                trajectory = event
            if trajectory is not None:
                return trajectory
            if time.monotonic() > deadline:
                raise UsageError(
                    f"session {session_id!r} has no trajectory after {timeout_s:g} s: it has not ended, made no call, "
                    "or belongs to another tenant"
                )
            await asyncio.sleep(_POLL_S)
