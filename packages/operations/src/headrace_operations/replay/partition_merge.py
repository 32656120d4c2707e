"""Order of records in a replay: the journal of a lineage, and merging of partitions in a reproducible order.

The order is that of time (of the records' times, then of the partition numbers), or the order in which a lineage read
the records.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.topics import Progress, Range, Topics, connected
from headrace_schemas import BatchRecord, TrainingMetrics
from headrace_schemas.programs import RecordedBatch, recorded_batches

if TYPE_CHECKING:
    from aiokafka import ConsumerRecord


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Journal entry: a partition was read up to an offset, then batches were formed, whose sizes are `cuts`."""

    partition: int
    until: int
    cuts: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    """Experiences that were left out of these batches."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Read ranges and batches of a lineage in order. `gap` is the reason why the journal is incomplete, or None."""

    ranges: tuple[ReadRange, ...]
    batches: tuple[BatchRecord, ...]
    gap: str | None = None
    recorded: tuple[RecordedBatch, ...] = ()
    """Records of the batches for a dry run."""


def build_journal(metrics: Iterable[TrainingMetrics], model: str, lineage: str) -> Journal:
    """Build the journal of a lineage from all training reports on the topic, which may include duplicates."""
    by_number = {report.account: report for report in metrics if (report.model, report.lineage) == (model, lineage)}
    reports = [by_number[number] for number in sorted(by_number)]
    batches = tuple(batch for report in reports for batch in report.batches)
    ranges: list[ReadRange] = []
    gap = _gap(reports, model, lineage)
    for report in reports:
        for batch in report.batches:
            ranges += (ReadRange(read.partition, read.until) for read in batch.read)
            # A batch may be cut by time without a new read; its experiences come from earlier reads then.
            if ranges:
                last, cut = ranges[-1], batch.experiences + len(batch.left_out)
                ranges[-1] = replace(last, cuts=(*last.cuts, cut), left_out=(*last.left_out, *batch.left_out))
            else:
                gap = gap or f"lineage {lineage} cut a batch before it read a record"
        ranges += (ReadRange(read.partition, read.until) for read in report.read)
    return Journal(tuple(ranges), batches, gap, recorded_batches(reports))


async def read(topics: Topics, model: str, lineage: str) -> Journal:
    """Read the journal of a lineage from the topic `training-metrics`."""
    events = [entry.event async for entry in topics.read(Range(TrainingMetrics.topic))]
    return build_journal((event for event in events if isinstance(event, TrainingMetrics)), model, lineage)


def _gap(reports: list[TrainingMetrics], model: str, lineage: str) -> str | None:
    if not reports:
        return f"training-metrics has no report of model {model} in lineage {lineage}"
    numbers = [report.account for report in reports]
    if numbers != list(range(len(numbers))):
        return f"training-metrics has not all reports of lineage {lineage}"
    if any(not report.batches and any(verdict.dropped is None for verdict in report.verdicts) for report in reports):
        return f"a part of lineage {lineage} was trained before batches were recorded"
    return None


@dataclass(frozen=True, slots=True)
class MergedRecord:
    """A record, with the sizes of the batches that the original training formed right after reading it."""

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
    """All partitions of a topic as one sequence of records; `open_merge` creates it.

    It can be iterated once, by `in_recorded_order` or `in_time_order`.
    """

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
        """Whether retention has deleted the oldest records of a partition."""
        return any(reader.progress.truncated for reader in self._readers.values())

    async def in_time_order(self) -> AsyncIterator[MergedRecord]:
        """Yield all remaining records, oldest first."""
        while heads := [(reader.head.timestamp, number) for number, reader in self._readers.items() if reader.head]:
            reader = self._readers[min(heads)[1]]
            assert reader.head is not None
            yield MergedRecord(reader.head)
            await reader.advance()

    async def in_recorded_order(self, ranges: Sequence[ReadRange]) -> AsyncIterator[MergedRecord]:
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
        async for merged in self.in_time_order():
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
