"""Copying of one partition: of a log with all records at their offsets, or of a compacted topic with its newest
records.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace_operations.mirror.side import MirrorConflict, Row, Side
from headrace_schemas import EVENTS

if TYPE_CHECKING:
    from aiokafka import TopicPartition

OnRecords = Callable[[int], None]
"""Called with the number of further records that were handled."""
PADDING = b"headrace-mirror-padding"
_BATCH_ROWS_MAX = 500
_BATCH_BYTES_MAX = 8_388_608
_PADDING_BATCH_ROWS = 100_000
_PADDING_TIME_MS = 1
Rows = dict[bytes | None, tuple[int, Row]]
"""Offset and contents of the newest record of each key, including tombstones; the oldest record first."""


@dataclass(frozen=True, slots=True)
class PartitionCheck:
    """Result of comparing a partition: the number of records, and a digest of their offsets, times and contents."""

    topic: str
    partition: int
    records: int
    digest: str


async def copy(source: Side, target: Side, topic_partition: TopicPartition, end: int, on_records: OnRecords) -> None:
    """Append the source's records below the offset `end` that the target's partition lacks.

    Records that the target already has are first compared with those of the source.

    Raises:
        MirrorConflict: the target has other records.
    """
    first = await _first_record(source, topic_partition, end)
    begin, present_end = (await target.bounds([topic_partition]))[topic_partition]
    if present_end > end:
        raise MirrorConflict(
            f"{_name(topic_partition)}: ends at {present_end} on {target.bus} and at {end} on {source.bus}; the "
            "target is in use already, or another bus was copied to it. To copy again, delete the topic on the target "
            "first"
        )
    if present_end <= first:
        await _check_padding(target, topic_partition, begin, present_end)
        on_records(present_end - begin)
        await _pad(target, topic_partition, present_end, first, on_records)
        if begin < first:
            await target.delete_before(topic_partition, first)
        present_end = first
    else:
        await compare(source, target, topic_partition, present_end, on_records)
    await _append(source, target, topic_partition, present_end, end, on_records)


async def compare(
    source: Side, target: Side, topic_partition: TopicPartition, end: int, on_records: OnRecords
) -> PartitionCheck:
    """Compare both sides up to `end`, from the first offset at which both have records.

    Raises:
        MirrorConflict: a record differs.
    """
    oldest = (await target.bounds([topic_partition]))[topic_partition][0]
    start = await _first_record(source, topic_partition, end, oldest)
    copied, digest, count = target.read(topic_partition, start, end), hashlib.sha256(), 0
    async for offset, row in _read_every_offset(source, topic_partition, start, end):
        copied_row = await anext(copied, None)
        if copied_row != (offset, row):
            raise MirrorConflict(
                f"{_name(topic_partition)} at {offset}: {target.bus} has other data than {source.bus}; mirror to a bus "
                "without a topic of this name, or delete the topic on the target first if it is not needed"
            )
        digest.update(repr((offset, row)).encode())
        count += 1
        on_records(1)
    return PartitionCheck(topic_partition.topic, topic_partition.partition, count, digest.hexdigest())


async def _append(
    source: Side, target: Side, topic_partition: TopicPartition, start: int, end: int, on_records: OnRecords
) -> None:
    """Append the source's records from `start`, the end of the target's partition, to `end`."""
    before = None
    if start > (await target.bounds([topic_partition]))[topic_partition][0]:
        (before,) = [row async for _, row in target.read(topic_partition, start - 1, start)]
    batch: list[Row] = []
    size, at = 0, start
    async for _, row in _read_every_offset(source, topic_partition, start, end, before):
        batch.append(row)
        size += len(row.value or b"") + len(row.key or b"")
        if len(batch) == _BATCH_ROWS_MAX or size > _BATCH_BYTES_MAX:
            await target.append(topic_partition, batch, at)
            on_records(len(batch))
            at, batch, size = at + len(batch), [], 0
    await target.append(topic_partition, batch, at)
    on_records(len(batch))


async def _read_every_offset(
    source: Side, topic_partition: TopicPartition, start: int, end: int, before: Row | None = None
) -> AsyncIterator[tuple[int, Row]]:
    """Yield a row for every offset of a range; an offset without a record gets a duplicate of the row before it.

    Args:
        source: the bus to read.
        topic_partition: the partition.
        start: first offset.
        end: offset after the last one.
        before: the row before `start`.

    Raises:
        UsageError: a duplicate is needed in a topic that is not one of Headrace's, whose consumers may not expect it.
    """
    expected = start
    async for offset, row in source.read(topic_partition, start, end):
        for missing in range(expected, offset):
            yield missing, _duplicate(topic_partition, missing, before)
        yield offset, row
        expected, before = offset + 1, row
    for missing in range(expected, end):
        yield missing, _duplicate(topic_partition, missing, before)


def _duplicate(topic_partition: TopicPartition, offset: int, before: Row | None) -> Row:
    assert before is not None, "a range begins with a record"
    if topic_partition.topic not in EVENTS:
        raise UsageError(
            f"{_name(topic_partition)}: has no record at {offset} (the end of a transaction), and only consumers of "
            "Headrace's topics are known to discard duplicates; exclude the topic with --without "
            f"{topic_partition.topic}"
        )
    return before


async def _first_record(source: Side, topic_partition: TopicPartition, end: int, from_offset: int = 0) -> int:
    """Return the offset of the first record from `from_offset` on; `end` if there is none."""
    start = max(from_offset, (await source.bounds([topic_partition]))[topic_partition][0])
    reading = source.read(topic_partition, start, end)
    try:
        async for offset, _ in reading:
            return offset
    finally:
        await reading.aclose()
    return end


async def _check_padding(target: Side, topic_partition: TopicPartition, begin: int, end: int) -> None:
    """Check that the target has only padding below the source's first record."""
    async for offset, row in target.read(topic_partition, begin, end):
        if row.key != PADDING:
            raise MirrorConflict(
                f"{_name(topic_partition)} at {offset}: {target.bus} has a record that the source has not; delete "
                "the topic on the target first if it is not needed"
            )


async def _pad(target: Side, topic_partition: TopicPartition, start: int, end: int, on_records: OnRecords) -> None:
    """Append padding records from `start` to `end`, which are deleted before real records follow.

    Their old timestamps put them into log segments of their own.
    """
    row = Row(PADDING, None, (), _PADDING_TIME_MS)
    for at in range(start, end, _PADDING_BATCH_ROWS):
        count = min(_PADDING_BATCH_ROWS, end - at)
        await target.append_repeated(topic_partition, row, count, at)
        on_records(count)


def _name(topic_partition: TopicPartition) -> str:
    return f"{topic_partition.topic}[{topic_partition.partition}]"


async def copy_newest(
    source: Side, target: Side, topic_partition: TopicPartition, end: int, on_records: OnRecords
) -> None:
    """Copy a compacted topic partition: write the newest record of each key to the target if it is missing or different
    there.

    Raises:
        MirrorConflict: the target has a record that is newer than the source's or missing there.
    """
    source_rows, target_rows = await read_rows(source, topic_partition, end), await read_rows(target, topic_partition)
    for key, (_, row) in target_rows.items():
        if key in source_rows and row.timestamp_ms <= source_rows[key][1].timestamp_ms:
            continue
        if key not in source_rows and row.value is None:
            continue
        raise MirrorConflict(
            f"{topic_partition.topic}[{topic_partition.partition}]: {target.bus} has a row with key {key!r} that is "
            f"newer than on {source.bus} or missing there; the target is in use already. To copy again, delete the "
            "topic "
            "there"
        )
    changed = [row for key, (_, row) in source_rows.items() if key not in target_rows or target_rows[key][1] != row]
    await target.append(topic_partition, changed, None)
    on_records(end - (await source.bounds([topic_partition]))[topic_partition][0])


async def compare_newest(
    source: Side, target: Side, topic_partition: TopicPartition, end: int, on_records: OnRecords
) -> PartitionCheck:
    """Compare the newest row of each key of a compacted topic on both buses. Deleted keys have no row.

    Raises:
        MirrorConflict: a row differs.
    """
    source_rows, target_rows = (
        _live_rows(await read_rows(source, topic_partition, end)),
        _live_rows(await read_rows(target, topic_partition)),
    )
    if source_rows != target_rows:
        differing = sorted(
            repr(key) for key in source_rows.keys() | target_rows.keys() if source_rows.get(key) != target_rows.get(key)
        )
        raise MirrorConflict(
            f"{topic_partition.topic}[{topic_partition.partition}]: {len(differing)} rows differ, such as "
            f"{differing[0]}"
        )
    on_records(end - (await source.bounds([topic_partition]))[topic_partition][0])
    digest = hashlib.sha256(repr(sorted(target_rows.items(), key=repr)).encode()).hexdigest()
    return PartitionCheck(topic_partition.topic, topic_partition.partition, len(target_rows), digest)


async def translate_positions(
    source: Side, target: Side, topic_partition: TopicPartition, positions: Collection[int]
) -> dict[int, int]:
    """Return the position on the target for each position of a group in a compacted topic of the source.

    It is the offset of the first row that the source wrote at the position or later. A group may read rows twice that
    were copied in several runs, but skips none. Both partitions are read once, because any number of groups may have
    positions in them.
    """
    source_rows = await read_rows(source, topic_partition, (await source.bounds([topic_partition]))[topic_partition][1])
    end = (await target.bounds([topic_partition]))[topic_partition][1]
    target_rows = await read_rows(target, topic_partition, end)
    sources = (source_rows[key][0] if key in source_rows else sys.maxsize for key in target_rows)
    latest, offsets = list(accumulate(sources, max)), [*(at for at, _ in target_rows.values()), end]
    return {position: offsets[bisect_left(latest, position)] for position in positions}


async def read_rows(side: Side, topic_partition: TopicPartition, end: int | None = None) -> Rows:
    """Return the newest record of each key of a compacted partition, with its offset.

    Args:
        side: the bus.
        topic_partition: the partition.
        end: offset before which records are read; None reads all.
    """
    begin, last = (await side.bounds([topic_partition]))[topic_partition]
    newest: Rows = {}
    async for offset, row in side.read(topic_partition, begin, last if end is None else end):
        newest.pop(row.key, None)
        newest[row.key] = offset, row
    return newest


def _live_rows(newest: Rows) -> dict[bytes | None, Row]:
    return {key: row for key, (_, row) in newest.items() if row.value is not None}
