"""`Follower`: read new records of topics. It keeps only offsets, so it can be used on several connections in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TypeVar

from headrace.topics import Range, Topics
from headrace_schemas import Event
from headrace_schemas.values.ids import decode_name

E = TypeVar("E", bound=Event)


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
