"""Copying of the positions of consumer groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from headrace_operations.mirror import tables
from headrace_operations.mirror.side import MirrorConflict, Side, Topic

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Positions = dict[str, dict["TopicPartition", tuple[int, str]]]
"""Group to its next offset and metadata for each partition."""


async def positions(side: Side, topics: Collection[str]) -> Positions:
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
    """Return the groups that have members now."""
    names = []
    for group in sorted(groups):
        (response,) = await side.admin.describe_consumer_groups([group])
        for _error, name, _state, _kind, _protocol, members, *_ in response.groups:
            names += [name] if members else []
    return names


async def copy(
    source: Side, target: Side, topics: Mapping[str, Topic], ends: Mapping[TopicPartition, int]
) -> Positions:
    """Set the positions of all groups on the target.

    Raises:
        MirrorConflict: a group has a later position on the target.
    """
    expected = {
        group: {
            partition: (
                await _translate(source, target, topics[partition.topic], partition, offset, ends[partition]),
                note,
            )
            for partition, (offset, note) in offsets.items()
        }
        for group, offsets in (await positions(source, topics)).items()
    }
    existing = await positions(target, topics)
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


async def _translate(source: Side, target: Side, topic: Topic, partition: TopicPartition, offset: int, end: int) -> int:
    """Return the target's offset for a source offset. In logs they are equal, but not beyond the copied end."""
    return await tables.translate_position(source, target, partition, offset) if topic.is_table else min(offset, end)
