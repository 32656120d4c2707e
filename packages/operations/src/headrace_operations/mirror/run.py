"""Mirroring of a bus: topics, records, positions, comparison. It may be interrupted and run again at any time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace_operations.mirror import groups, logs, tables
from headrace_operations.mirror.groups import Positions
from headrace_operations.mirror.logs import PartitionCheck
from headrace_operations.mirror.side import MirrorConflict, Side, Topic, open_side

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Report = Callable[[str, int, int], None]
"""Called with the activity, the completed amount and the total amount."""


@dataclass(slots=True)
class MirrorResult:
    """Contents of the target. It is a complete copy of the source if `moving` is empty."""

    checked: list[PartitionCheck] = field(default_factory=list)
    positions: Positions = field(default_factory=dict)
    moving: list[str] = field(default_factory=list)
    """Changes of the source that happen now, as text."""


async def mirror(
    source_bus: str,
    target_bus: str,
    *,
    without: Collection[str] = (),
    replication: int = 1,
    report: Report = lambda _activity, _completed, _total: None,
) -> MirrorResult:
    """Copy the records that the target lacks, and compare both buses.

    Args:
        source_bus: bootstrap servers of the source.
        target_bus: bootstrap servers of the target.
        without: topics to exclude.
        replication: replication factor of new topics.
        report: called with the progress.

    Raises:
        MirrorConflict: the target has other data.
        UsageError: the topics cannot be made equal.
        Unreachable: a bus does not answer.
    """
    if source_bus == target_bus:
        raise UsageError(f"{source_bus}: is both source and target; name another target")
    async with open_side(source_bus) as source, open_side(target_bus) as target:
        topics = {name: topic for name, topic in (await source.topics()).items() if name not in without}
        if not topics:
            raise UsageError(f"{source_bus}: has no topics to mirror")
        await _prepare(target, topics, replication)
        bounds = await source.bounds(_partitions(topics))
        ends = {partition: end for partition, (_, end) in bounds.items()}
        sizes = [int(topic.config["max.message.bytes"]) for topic in topics.values()]
        await target.open_producer(largest=max(sizes), batch=min(sizes) // 2)

        on_records = _counter("copying", sum(ends.values()), report)
        for partition, end in ends.items():
            kind = tables if topics[partition.topic].is_table else logs
            await kind.copy(source, target, partition, end, on_records)
        result = MirrorResult(positions=await groups.copy(source, target, topics, ends))

        on_records = _counter("comparing", sum(end - begin for begin, end in bounds.values()), report)
        for partition, end in ends.items():
            kind = tables if topics[partition.topic].is_table else logs
            result.checked.append(await kind.compare(source, target, partition, end, on_records))
        await _compare_positions(target, topics, result.positions)
        result.moving = await _find_changes(source, ends, result.positions)
        return result


async def _prepare(target: Side, topics: Mapping[str, Topic], replication: int) -> None:
    """Create missing topics on the target and check that all have the same number of partitions as on the source."""
    existing = await target.topics()
    for name, topic in topics.items():
        present = existing.get(name, topic)
        if present.partitions != topic.partitions:
            raise UsageError(
                f"topic {name}: has {topic.partitions} partitions here and {present.partitions} on {target.bus}, so "
                "keys would change their partitions; delete the topic on the target, it will be created as it is here"
            )
        if present.is_table != topic.is_table:
            raise UsageError(
                f"topic {name}: cleanup.policy = {topic.config['cleanup.policy']} here and "
                f"{present.config['cleanup.policy']} on {target.bus}; delete it there, it will be created as it is here"
            )
    await target.create([topic for name, topic in topics.items() if name not in existing], replication)


def _partitions(topics: Mapping[str, Topic]) -> list[TopicPartition]:
    from aiokafka import TopicPartition

    return [
        TopicPartition(name, number) for name, topic in sorted(topics.items()) for number in range(topic.partitions)
    ]


def _counter(activity: str, total: int, report: Report) -> logs.OnRecords:
    """Return a callback that reports the progress after each hundredth of `total`."""
    completed = reported = 0

    def on_records(added: int) -> None:
        nonlocal completed, reported
        completed = min(completed + added, total)
        if completed == total or completed - reported > total // 100:
            reported = completed
            report(activity, completed, total)

    return on_records


async def _compare_positions(target: Side, topics: Mapping[str, Topic], expected: Positions) -> None:
    actual = await groups.positions(target, topics)
    for group, offsets in expected.items():
        for partition, at in offsets.items():
            if actual.get(group, {}).get(partition) != at:
                raise MirrorConflict(
                    f"group {group}: is not at {at[0]} of {partition.topic}[{partition.partition}] on {target.bus}"
                )


async def _find_changes(source: Side, ends: Mapping[TopicPartition, int], positions: Positions) -> list[str]:
    """Return the topics that grow and the groups that have members now, as text."""
    now = {partition: end for partition, (_, end) in (await source.bounds(list(ends))).items()}
    grown = sorted({partition.topic for partition, end in ends.items() if now[partition] != end})
    busy = await groups.groups_with_members(source, positions)
    return [*(f"topic {name} grows" for name in grown), *(f"group {name} has members" for name in busy)]
