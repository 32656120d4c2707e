"""Copying of one partition of a compacted topic: the newest record of each key, in the order of writing."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from headrace_operations.mirror.logs import OnRecords, PartitionCheck
from headrace_operations.mirror.side import MirrorConflict, Row, Side

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Rows = dict[bytes | None, tuple[int, Row]]
"""Key to the offset and contents of its newest record, tombstones included; oldest first."""


async def copy(source: Side, target: Side, topic_partition: TopicPartition, end: int, on_records: OnRecords) -> None:
    """Write the rows that differ on the target.

    Raises:
        MirrorConflict: the target has a row that is newer than the source's or missing there.
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


async def compare(
    source: Side, target: Side, topic_partition: TopicPartition, end: int, on_records: OnRecords
) -> PartitionCheck:
    """Compare the live rows of both sides.

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


async def translate_position(source: Side, target: Side, topic_partition: TopicPartition, committed: int) -> int:
    """Return the target's offset for a position on the source: the first row that was written at `committed` or later.

    Rows that were copied in several runs may be read twice, but none is skipped.
    """
    source_rows = await read_rows(source, topic_partition, (await source.bounds([topic_partition]))[topic_partition][1])
    end = (await target.bounds([topic_partition]))[topic_partition][1]
    target_rows = await read_rows(target, topic_partition, end)
    return next(
        (at for key, (at, _) in target_rows.items() if key not in source_rows or source_rows[key][0] >= committed), end
    )


async def read_rows(side: Side, topic_partition: TopicPartition, end: int | None = None) -> Rows:
    """Read the newest row of each key up to `end`, by default all."""
    begin, last = (await side.bounds([topic_partition]))[topic_partition]
    newest: Rows = {}
    async for offset, row in side.read(topic_partition, begin, last if end is None else end):
        newest.pop(row.key, None)
        newest[row.key] = offset, row
    return newest


def _live_rows(newest: Rows) -> dict[bytes | None, Row]:
    return {key: row for key, (_, row) in newest.items() if row.value is not None}
