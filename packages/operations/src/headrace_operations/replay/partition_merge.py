"""Merges the partitions of a topic into one order that does not depend on how fast each of them is read.

By time (of the records, then the number of the partition), or as a lineage has read them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.topics import Progress, Range, connected
from headrace_operations.replay.journal import Stretch

if TYPE_CHECKING:
    from aiokafka import ConsumerRecord


@dataclass(frozen=True, slots=True)
class Place:
    """A record and, where batches were cut after it, of how many experiences each."""

    record: ConsumerRecord
    cuts: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    """Experiences that were left out of these batches."""


class PartitionReader:
    """One partition, read by a connection of its own."""

    def __init__(self, records: AsyncIterator[ConsumerRecord], progress: Progress) -> None:
        self._records = records
        self.progress = progress
        self.head: ConsumerRecord | None = None
        """The next record; None at the end, and before the first `advance`."""

    async def advance(self) -> None:
        self.head = await anext(self._records, None)


class PartitionMerge:
    """All of them; `opened` makes one. It can be gone through once, by `as_read` or `by_time`."""

    def __init__(self, readers: dict[int, PartitionReader]) -> None:
        self._readers = readers

    @property
    def total(self) -> int:
        return sum(reader.progress.total for reader in self._readers.values())

    @property
    def passed(self) -> int:
        return sum(reader.progress.passed for reader in self._readers.values())

    @property
    def truncated(self) -> bool:
        """Retention has taken the oldest records."""
        return any(reader.progress.truncated for reader in self._readers.values())

    async def by_time(self) -> AsyncIterator[Place]:
        """Whatever has not been passed yet, the oldest first."""
        while waiting := [(reader.head.timestamp, number) for number, reader in self._readers.items() if reader.head]:
            reader = self._readers[min(waiting)[1]]
            assert reader.head is not None
            yield Place(reader.head)
            await reader.advance()

    async def as_read(self, stretches: Sequence[Stretch]) -> AsyncIterator[Place]:
        """As the journal says, then what it does not mention, by time."""
        for stretch in stretches:
            last: ConsumerRecord | None = None
            reader = self._readers.get(stretch.partition)
            while reader is not None and reader.head is not None and reader.head.offset < stretch.until:
                if last is not None:
                    yield Place(last)
                last = reader.head
                await reader.advance()
            if last is not None:
                yield Place(last, stretch.cuts, stretch.left_out)
        async for place in self.by_time():
            yield place


@asynccontextmanager
async def opened(bus: str, wanted: Range) -> AsyncIterator[PartitionMerge]:
    """Connect to every partition of the range. Raises `UsageError`, `Unreachable`."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(connected(bus))
        ends = (await first.ends([wanted.topic]))[wanted.topic]
        readers = {}
        for number in sorted(set(wanted.partitions) or ends):
            topics = await stack.enter_async_context(connected(bus))
            progress = Progress()
            records = topics.records(replace(wanted, partitions=(number,)), progress, ends)
            readers[number] = PartitionReader(records, progress)
            await readers[number].advance()
        yield PartitionMerge(readers)
