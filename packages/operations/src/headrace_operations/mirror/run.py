"""Mirroring of a bus: topics, records, positions of consumer groups, comparison. An interrupted run can be repeated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace_operations.mirror import logs
from headrace_operations.mirror.logs import PartitionCheck
from headrace_operations.mirror.side import MirrorConflict, Side, Topic, open_side

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Positions = dict[str, dict["TopicPartition", tuple[int, str]]]
"""Next offset and metadata of each consumer group for each partition."""
Report = Callable[[str, int, int], None]
"""Called with the activity, the completed amount and the total amount."""


async def read_positions(side: Side, topics: Collection[str]) -> Positions:
    """Return the positions of every group that has committed an offset of one of `topics`."""
    by_group: Positions = {}
    for group, *_ in await side.admin.list_consumer_groups():
        committed = await side.admin.list_consumer_group_offsets(group)
        offsets = {
            partition: (committed_offset.offset, committed_offset.metadata or "")
            for partition, committed_offset in committed.items()
            if partition.topic in topics and committed_offset.offset >= 0
        }
        if offsets:
            by_group[group] = offsets
    return by_group


async def groups_with_members(side: Side, groups: Collection[str]) -> list[str]:
    """Return the consumer groups that have members at present."""
    names = []
    for group in sorted(groups):
        (response,) = await side.admin.describe_consumer_groups([group])
        for _error, name, _state, _kind, _protocol, members, *_ in response.groups:
            names += [name] if members else []
    return names


async def copy_positions(
    source: Side, target: Side, topics: Mapping[str, Topic], ends: Mapping[TopicPartition, int]
) -> Positions:
    """Commit the positions of all consumer groups of the source on the target, and return them.

    Raises:
        MirrorConflict: a group has a later position on the target.
    """
    positions = await read_positions(source, topics)
    committed: dict[TopicPartition, set[int]] = defaultdict(set)
    for offsets in positions.values():
        for partition, (offset, _) in offsets.items():
            committed[partition].add(offset)
    translated = {
        partition: await _translate(source, target, topics[partition.topic], partition, offsets, ends[partition])
        for partition, offsets in committed.items()
    }
    expected = {
        group: {partition: (translated[partition][offset], note) for partition, (offset, note) in offsets.items()}
        for group, offsets in positions.items()
    }
    existing = await read_positions(target, topics)
    for group, offsets in expected.items():
        present = existing.get(group, {})
        for partition, (offset, _) in present.items():
            if offset > offsets.get(partition, (0, ""))[0]:
                raise MirrorConflict(
                    f"group {group}: is at {offset} of {partition.topic}[{partition.partition}] on {target.bus}, after "
                    f"its position on {source.bus}; the target is in use already"
                )
        changed = {partition: at for partition, at in offsets.items() if present.get(partition) != at}
        if changed:
            await target.commit(group, changed)
    return expected


async def _translate(
    source: Side, target: Side, topic: Topic, partition: TopicPartition, offsets: Collection[int], end: int
) -> dict[int, int]:
    """Return the target's offsets for positions of groups on the source.

    In logs both are equal, up to the copied end; in compacted topics the positions are translated.
    """
    if topic.is_table:
        return await logs.translate_positions(source, target, partition, offsets)
    return {offset: min(offset, end) for offset in offsets}


@dataclass(slots=True)
class MirrorResult:
    """Result of mirroring: the compared partitions and group positions.

    The copy is complete if `moving`, the topics and groups that changed meanwhile, is empty.
    """

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
            copy = logs.copy_newest if topics[partition.topic].is_table else logs.copy
            await copy(source, target, partition, end, on_records)
        result = MirrorResult(positions=await copy_positions(source, target, topics, ends))

        on_records = _counter("comparing", sum(end - begin for begin, end in bounds.values()), report)
        for partition, end in ends.items():
            compare = logs.compare_newest if topics[partition.topic].is_table else logs.compare
            result.checked.append(await compare(source, target, partition, end, on_records))
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
    actual = await read_positions(target, topics)
    for group, offsets in expected.items():
        for partition, at in offsets.items():
            if actual.get(group, {}).get(partition) != at:
                raise MirrorConflict(
                    f"group {group}: is not at {at[0]} of {partition.topic}[{partition.partition}] on {target.bus}"
                )


async def _find_changes(source: Side, ends: Mapping[TopicPartition, int], positions: Positions) -> list[str]:
    """Return texts about the topics that got records and the groups that had members during the copy."""
    now = {partition: end for partition, (_, end) in (await source.bounds(list(ends))).items()}
    grown = sorted({partition.topic for partition, end in ends.items() if now[partition] != end})
    busy = await groups_with_members(source, positions)
    return [*(f"topic {name} grows" for name in grown), *(f"group {name} has members" for name in busy)]
