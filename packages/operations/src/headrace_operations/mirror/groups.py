"""Copies the positions of consumer groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from headrace_operations.mirror import tables
from headrace_operations.mirror.side import NotACopy, Side, Topic

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Positions = dict[str, dict["TopicPartition", tuple[int, str]]]
"""Group to the next offset that it reads of each partition, with its note."""


async def positions(side: Side, topics: Collection[str]) -> Positions:
    """Of every group that has committed something on one of `topics`."""
    found: Positions = {}
    for group, *_ in await side.admin.list_consumer_groups():
        committed = await side.admin.list_consumer_group_offsets(group)
        of_group = {
            place: (one.offset, one.metadata or "")
            for place, one in committed.items()
            if place.topic in topics and one.offset >= 0
        }
        if of_group:
            found[group] = of_group
    return found


async def active(side: Side, groups: Collection[str]) -> list[str]:
    """The groups that have members now."""
    found = []
    for group in sorted(groups):
        (response,) = await side.admin.describe_consumer_groups([group])
        for _error, name, _state, _kind, _protocol, members, *_ in response.groups:
            found += [name] if members else []
    return found


async def copy(
    source: Side, target: Side, topics: Mapping[str, Topic], ends: Mapping[TopicPartition, int]
) -> Positions:
    """Set the positions of all groups on the target. Raises `NotACopy` when a group is further on there."""
    wanted = {
        group: {
            place: (await _translated(source, target, topics[place.topic], place, offset, ends[place]), note)
            for place, (offset, note) in places.items()
        }
        for group, places in (await positions(source, topics)).items()
    }
    there = await positions(target, topics)
    for group, places in wanted.items():
        known = there.get(group, {})
        for place, (offset, _) in known.items():
            if offset > places.get(place, (0, ""))[0]:
                raise NotACopy(
                    f"group {group} is at {offset} of {place.topic}[{place.partition}] on {target.bus}, further than "
                    f"on {source.bus}: the target is in use already"
                )
        changed = {place: at for place, at in places.items() if known.get(place) != at}
        if changed:
            await target.commit(group, changed)
    return wanted


async def _translated(source: Side, target: Side, topic: Topic, place: TopicPartition, offset: int, end: int) -> int:
    """Logs have equal offsets; a position behind records that were not committed in the end is the end."""
    return await tables.position(source, target, place, offset) if topic.is_table else min(offset, end)
