"""Merging of the partitions of a topic in an order that does not depend on the speed of reading.

The order is that of time (of the records, then of the partition numbers), or the order in which a lineage read them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.topics import Progress, Range, connected
from headrace_operations.replay.journal import ReadRange

if TYPE_CHECKING:
    from aiokafka import ConsumerRecord


@dataclass(frozen=True, slots=True)
class MergedRecord:
    """A record, with the sizes of the batches that the lineage cut after it."""

    record: ConsumerRecord
    cuts: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    """Experiences that were left out of these batches."""


class PartitionReader:
    """Reader of one partition with its own connection."""

    def __init__(self, records: AsyncIterator[ConsumerRecord], progress: Progress) -> None:
        self._records = records
        self.progress = progress
        self.head: ConsumerRecord | None = None
        """The next record; None at the end, and before the first `advance`."""

    async def advance(self) -> None:
        self.head = await anext(self._records, None)


class PartitionMerge:
    """All partitions of a topic; `open_merge` creates one. It can be iterated once, by `as_read` or `by_time`."""

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
        """Whether retention has deleted the oldest records."""
        return any(reader.progress.truncated for reader in self._readers.values())

    async def by_time(self) -> AsyncIterator[MergedRecord]:
        """Yield all remaining records, oldest first."""
        while heads := [(reader.head.timestamp, number) for number, reader in self._readers.items() if reader.head]:
            reader = self._readers[min(heads)[1]]
            assert reader.head is not None
            yield MergedRecord(reader.head)
            await reader.advance()

    async def as_read(self, ranges: Sequence[ReadRange]) -> AsyncIterator[MergedRecord]:
        """Yield the records in the order of the journal, then the remaining records by time."""
        for read_range in ranges:
            last: ConsumerRecord | None = None
            reader = self._readers.get(read_range.partition)
            while reader is not None and reader.head is not None and reader.head.offset < read_range.until:
                if last is not None:
                    yield MergedRecord(last)
                last = reader.head
                await reader.advance()
            if last is not None:
                yield MergedRecord(last, read_range.cuts, read_range.left_out)
        async for merged in self.by_time():
            yield merged


@asynccontextmanager
async def open_merge(bus: str, topic_range: Range) -> AsyncIterator[PartitionMerge]:
    """Connect to every partition of the range.

    Raises:
        UsageError: the topic does not exist.
        Unreachable: the bus does not answer.
    """
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(connected(bus))
        ends = (await first.ends([topic_range.topic]))[topic_range.topic]
        readers = {}
        for number in sorted(set(topic_range.partitions) or ends):
            topics = await stack.enter_async_context(connected(bus))
            progress = Progress()
            records = topics.records(replace(topic_range, partitions=(number,)), progress, ends)
            readers[number] = PartitionReader(records, progress)
            await readers[number].advance()
        yield PartitionMerge(readers)
