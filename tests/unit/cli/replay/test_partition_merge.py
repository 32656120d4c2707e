"""Merging of partitions: the order does not depend on speed, by time or as a lineage has read them."""

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
    """The fields of a `ConsumerRecord` that the merge reads."""

    partition: int
    offset: int
    timestamp: int


async def merge(*partitions: list[Message], delays: random.Random | None = None) -> PartitionMerge:
    async def records(messages: list[Message]) -> AsyncIterator[Any]:
        for message in messages:
            for _ in range(delays.randrange(3) if delays else 0):
                await asyncio.sleep(0)
            yield message

    readers = {number: PartitionReader(records(messages), Progress()) for number, messages in enumerate(partitions)}
    for reader in readers.values():
        await reader.advance()
    return PartitionMerge(readers)


def log(partition: int, *timestamps: int) -> list[Message]:
    return [Message(partition, offset, timestamp) for offset, timestamp in enumerate(timestamps)]


async def positions_of(records: AsyncIterator[Any]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(merged.record.partition, merged.record.offset, merged.cuts) async for merged in records]


async def test_by_time_keeps_the_order_of_each_partition() -> None:
    positions = await positions_of((await merge(log(0, 1, 5, 2), log(1, 1, 3))).by_time())
    assert positions == [(0, 0, ()), (1, 0, ()), (1, 1, ()), (0, 1, ()), (0, 2, ())]


@pytest.mark.parametrize("seed", range(5))
async def test_the_order_does_not_depend_on_speed(seed: int) -> None:
    generator = random.Random(seed)
    logs = [log(number, *(generator.randrange(50) for _ in range(30))) for number in range(3)]
    without_delays = await positions_of((await merge(*logs)).by_time())
    with_delays = await positions_of((await merge(*logs, delays=generator)).by_time())
    assert without_delays == with_delays
    assert len(without_delays) == 90


async def test_as_read_yields_cuts_and_then_the_remaining_records() -> None:
    ranges = [ReadRange(1, 2), ReadRange(0, 1, (3, 2)), ReadRange(1, 3), ReadRange(7, 9), ReadRange(0, 1)]
    positions = await positions_of((await merge(log(0, 9, 9, 4), log(1, 8, 8, 8, 2))).as_read(ranges))
    assert positions == [
        (1, 0, ()),
        (1, 1, ()),
        (0, 0, (3, 2)),
        (1, 2, ()),
        (1, 3, ()),
        (0, 1, ()),
        (0, 2, ()),
    ]
