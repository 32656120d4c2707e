"""Reads what is new on topics. Keeps only offsets, so one may be used on one connection after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TypeVar

from headrace.topics import Range, Topics
from headrace_schemas import Event
from headrace_schemas.names import decode_name

E = TypeVar("E", bound=Event)


class Follower:
    """Starts at the beginning of each topic, or after `begin` at its end of then."""

    def __init__(self, *topics: str) -> None:
        self._at: dict[str, dict[int, int]] = {topic: {} for topic in topics}

    async def begin(self, topics: Topics) -> None:
        self._at = await topics.ends(list(self._at))

    async def events(self, topics: Topics, kind: type[E], keys: Collection[str] = ()) -> AsyncIterator[E]:
        """The new events of a kind. A record that holds none is passed: its consumer dead-letters it."""
        async for wanted, end in self._ranges(topics, kind.topic, keys):
            async for entry in topics.read(wanted, ends=end):
                if isinstance(entry.event, kind):
                    yield entry.event

    async def keys(self, topics: Topics, topic: str) -> AsyncIterator[str]:
        """The keys of new records, which are not decoded."""
        async for wanted, end in self._ranges(topics, topic, ()):
            async for record in topics.records(wanted, ends=end):
                yield decode_name(record.key or b"")

    async def _ranges(
        self, topics: Topics, topic: str, keys: Collection[str]
    ) -> AsyncIterator[tuple[Range, dict[int, int]]]:
        """What is new of each partition; its offset moves once the caller has read it."""
        at = self._at[topic]
        for partition, end in (await topics.ends([topic]))[topic].items():
            start = at.setdefault(partition, 0)
            if end > start:
                yield Range(topic, partitions=[partition], from_offset=start, keys=keys), {partition: end}
                at[partition] = end
