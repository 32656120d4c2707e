"""Mirrors a bus: topics, records, positions, comparison. It may be killed and run again at any point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace_operations.mirror import groups, logs, tables
from headrace_operations.mirror.groups import Positions
from headrace_operations.mirror.logs import Checked
from headrace_operations.mirror.side import NotACopy, Side, Topic, opened

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Report = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how much there is."""


@dataclass(slots=True)
class Mirrored:
    """What the target holds now. It is the whole of the source if `moving` is empty."""

    checked: list[Checked] = field(default_factory=list)
    positions: Positions = field(default_factory=dict)
    moving: list[str] = field(default_factory=list)
    """What still changes the source, in words."""


async def mirror(
    source_bus: str,
    target_bus: str,
    *,
    without: Collection[str] = (),
    replication: int = 1,
    report: Report = lambda _what, _done, _all: None,
) -> Mirrored:
    """Copy everything that is on the source, or what is missing of it, and compare.

    Raises `NotACopy` when the target holds other data, `UsageError` when the topics cannot be alike, `Unreachable`.
    It may be killed at any moment and started again.
    """
    if source_bus == target_bus:
        raise UsageError(f"{source_bus} cannot be mirrored to itself")
    async with opened(source_bus) as source, opened(target_bus) as target:
        topics = {name: one for name, one in (await source.topics()).items() if name not in without}
        if not topics:
            raise UsageError(f"{source_bus} has no topics to mirror")
        await _prepare(target, topics, replication)
        bounds = await source.bounds(_places(topics))
        ends = {place: end for place, (_, end) in bounds.items()}
        sizes = [int(one.config["max.message.bytes"]) for one in topics.values()]
        await target.open_producer(largest=max(sizes), batch=min(sizes) // 2)

        passed = _counter("copying", sum(ends.values()), report)
        for place, end in ends.items():
            kind = tables if topics[place.topic].is_table else logs
            await kind.copy(source, target, place, end, passed)
        made = Mirrored(positions=await groups.copy(source, target, topics, ends))

        passed = _counter("comparing", sum(end - begun for begun, end in bounds.values()), report)
        for place, end in ends.items():
            kind = tables if topics[place.topic].is_table else logs
            made.checked.append(await kind.compare(source, target, place, end, passed))
        await _compare_positions(target, topics, made.positions)
        made.moving = await _moving(source, ends, made.positions)
        return made


async def _prepare(target: Side, topics: Mapping[str, Topic], replication: int) -> None:
    """Let every topic exist on the target with as many partitions, so that keys stay where they are."""
    there = await target.topics()
    for name, wanted in topics.items():
        found = there.get(name, wanted)
        if found.partitions != wanted.partitions:
            raise UsageError(
                f"topic {name} has {wanted.partitions} partitions here and {found.partitions} on {target.bus}; keys "
                "would come to lie elsewhere. Delete the topic there, it will be created as it is here"
            )
        if found.is_table != wanted.is_table:
            raise UsageError(
                f"topic {name} has cleanup.policy={wanted.config['cleanup.policy']} here and "
                f"{found.config['cleanup.policy']} on {target.bus}; delete it there, it will be created as it is here"
            )
    await target.create([one for name, one in topics.items() if name not in there], replication)


def _places(topics: Mapping[str, Topic]) -> list[TopicPartition]:
    from aiokafka import TopicPartition

    return [TopicPartition(name, number) for name, one in sorted(topics.items()) for number in range(one.partitions)]


def _counter(what: str, total: int, report: Report) -> logs.Passed:
    """Reports each hundredth of the way."""
    done = told = 0

    def passed(count: int) -> None:
        nonlocal done, told
        done = min(done + count, total)
        if done == total or done - told > total // 100:
            told = done
            report(what, done, total)

    return passed


async def _compare_positions(target: Side, topics: Mapping[str, Topic], wanted: Positions) -> None:
    found = await groups.positions(target, topics)
    for group, places in wanted.items():
        for place, at in places.items():
            if found.get(group, {}).get(place) != at:
                raise NotACopy(f"group {group} is not at {at[0]} of {place.topic}[{place.partition}] on {target.bus}")


async def _moving(source: Side, ends: Mapping[TopicPartition, int], positions: Positions) -> list[str]:
    now = {place: end for place, (_, end) in (await source.bounds(list(ends))).items()}
    grown = sorted({place.topic for place, end in ends.items() if now[place] != end})
    busy = await groups.active(source, positions)
    return [*(f"topic {name} grows" for name in grown), *(f"group {name} has members" for name in busy)]
