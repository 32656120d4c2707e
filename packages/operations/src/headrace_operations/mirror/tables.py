"""Copies a partition of a compacted topic: the newest record of each key, in the order in which they were written."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from headrace_operations.mirror.logs import Checked, Passed
from headrace_operations.mirror.side import NotACopy, Row, Side

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Rows = dict[bytes | None, tuple[int, Row]]
"""Key to the newest record with it, tombstones included, and its offset; oldest first."""


async def copy(source: Side, target: Side, place: TopicPartition, end: int, passed: Passed) -> None:
    """Write the rows in which the target differs. Raises `NotACopy` when it knows more than the source."""
    wanted, found = await rows(source, place, end), await rows(target, place)
    for key, (_, row) in found.items():
        if key in wanted and row.timestamp_ms <= wanted[key][1].timestamp_ms:
            continue
        if key not in wanted and row.value is None:
            continue
        raise NotACopy(
            f"{place.topic}[{place.partition}] on {target.bus} has a row of {key!r} that {source.bus} has not, or an "
            "older one: the target is in use already. To copy again, delete the topic there first"
        )
    changed = [row for key, (_, row) in wanted.items() if key not in found or found[key][1] != row]
    await target.append(place, changed, None)
    passed(end - (await source.bounds([place]))[place][0])


async def compare(source: Side, target: Side, place: TopicPartition, end: int, passed: Passed) -> Checked:
    """The table as both sides have it. Raises `NotACopy` when they differ."""
    theirs, ours = _live(await rows(source, place, end)), _live(await rows(target, place))
    if theirs != ours:
        differing = sorted(repr(key) for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
        raise NotACopy(f"{place.topic}[{place.partition}]: {len(differing)} rows differ, {differing[0]} for one")
    passed(end - (await source.bounds([place]))[place][0])
    digest = hashlib.sha256(repr(sorted(ours.items(), key=repr)).encode()).hexdigest()
    return Checked(place.topic, place.partition, len(ours), digest)


async def position(source: Side, target: Side, place: TopicPartition, committed: int) -> int:
    """The target's offset for a position on the source: the first row there that was written at `committed` or later.

    Rows that were copied in several runs may be read once more, never once less.
    """
    written = await rows(source, place, (await source.bounds([place]))[place][1])
    end = (await target.bounds([place]))[place][1]
    copied = await rows(target, place, end)
    return next((at for key, (at, _) in copied.items() if key not in written or written[key][0] >= committed), end)


async def rows(side: Side, place: TopicPartition, end: int | None = None) -> Rows:
    begun, last = (await side.bounds([place]))[place]
    found: Rows = {}
    async for offset, row in side.read(place, begun, last if end is None else end):
        found.pop(row.key, None)
        found[row.key] = offset, row
    return found


def _live(found: Rows) -> dict[bytes | None, Row]:
    return {key: row for key, (_, row) in found.items() if row.value is not None}
