"""Partitions side by side: one order, whatever the speed of each, by time or as a lineage has read them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.topics import Progress
from headrace_operations.replay.journal import ReadRange
from headrace_operations.replay.partition_merge import PartitionMerge, PartitionReader


@dataclass(frozen=True)
class Message:
    """As much of a `ConsumerRecord` as the merge looks at."""

    partition: int
    offset: int
    timestamp: int


async def merge(*partitions: list[Message], delays: random.Random | None = None) -> PartitionMerge:
    async def records(messages: list[Message]) -> AsyncIterator[Any]:
        for message in messages:
            for _ in range(delays.randrange(3) if delays else 0):
                await asyncio.sleep(0)
            yield message

    made = {number: PartitionReader(records(messages), Progress()) for number, messages in enumerate(partitions)}
    for reader in made.values():
        await reader.advance()
    return PartitionMerge(made)


def log(partition: int, *timestamps: int) -> list[Message]:
    return [Message(partition, offset, timestamp) for offset, timestamp in enumerate(timestamps)]


async def taken(places: AsyncIterator[Any]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(place.record.partition, place.record.offset, place.cuts) async for place in places]


async def test_by_time_then_partition_and_never_against_a_partitions_own_order() -> None:
    found = await taken((await merge(log(0, 1, 5, 2), log(1, 1, 3))).by_time())
    assert found == [(0, 0, ()), (1, 0, ()), (1, 1, ()), (0, 1, ()), (0, 2, ())]


@pytest.mark.parametrize("seed", range(5))
async def test_the_order_does_not_depend_on_speed(seed: int) -> None:
    draw = random.Random(seed)
    logs = [log(number, *(draw.randrange(50) for _ in range(30))) for number in range(3)]
    at_once = await taken((await merge(*logs)).by_time())
    slowly = await taken((await merge(*logs, delays=draw)).by_time())
    assert at_once == slowly
    assert len(at_once) == 90


async def test_as_read_with_cuts_and_then_the_rest() -> None:
    ranges = [ReadRange(1, 2), ReadRange(0, 1, (3, 2)), ReadRange(1, 3), ReadRange(7, 9), ReadRange(0, 1)]
    found = await taken((await merge(log(0, 9, 9, 4), log(1, 8, 8, 8, 2))).as_read(ranges))
    assert found == [
        (1, 0, ()),
        (1, 1, ()),
        (0, 0, (3, 2)),
        (1, 2, ()),
        (1, 3, ()),
        (0, 1, ()),
        (0, 2, ()),
    ]
