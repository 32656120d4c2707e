"""Behaviour that our readers without a group rely on: tables, the trainer's source, the registry's reader, offsets."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import ConsumerStoppedError, IllegalOperation, IllegalStateError

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.consumer import assign_all, partitions_of
from headrace_runtime.kafka.wire import Record
from tests.contract.used.ground import (
    Ground,
    Scenario,
    consuming,
    eventually,
    offsets,
    poll,
    producing,
    send,
    take,
    values,
)


async def _filled(ground: Ground, *counts: int) -> str:
    """Create a topic with that many records in each partition; each holds its partition and offset."""
    topic = await ground.create(len(counts))
    async with producing(ground) as producer:
        for partition, count in enumerate(counts):
            await send(producer, topic, [b"%d:%d" % (partition, number) for number in range(count)], partition)
    return topic


async def begin_end_and_position(ground: Ground) -> None:
    topic = await _filled(ground, 3, 0)
    async with consuming(ground) as reader:
        assert await partitions_of(reader, topic) == [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        first, empty = partitions = await assign_all(reader, topic)
        assert await reader.beginning_offsets(partitions) == {first: 0, empty: 0}
        assert await reader.end_offsets(partitions) == {first: 3, empty: 0}
        assert [await reader.position(partition) for partition in partitions] == [0, 0], (
            "our readers begin at the oldest record"
        )
        assert values(await take(reader, 3)) == [b"0:0", b"0:1", b"0:2"]
        assert [await reader.position(partition) for partition in partitions] == [3, 0]


async def unknown_topics_have_no_partitions(ground: Ground) -> None:
    async with consuming(ground) as reader:
        with pytest.raises(Unavailable, match="does not exist yet"):
            await partitions_of(reader, "no-such-topic")


async def seek_anywhere(ground: Ground) -> None:
    """Forth, back, to the beginning, to the end; the position is the new one at once."""
    topic = await _filled(ground, 40)
    partition = TopicPartition(topic, 0)
    async with consuming(ground) as reader:
        reader.assign([partition])
        for offset in (ground.draw.randrange(40), 39, 0, ground.draw.randrange(40)):
            reader.seek(partition, offset)
            assert await reader.position(partition) == offset
            assert offsets(await take(reader, 40 - offset)) == list(range(offset, 40))
        await reader.seek_to_beginning(partition)
        assert await reader.position(partition) == 0
        assert offsets(await take(reader, 40)) == list(range(40))
        reader.seek(partition, 40)
        assert await poll(reader) == []
        async with producing(ground) as producer:
            await send(producer, topic, [b"new"])
        assert values(await take(reader, 1)) == [b"new"]


async def behind_the_end_starts_over(ground: Ground) -> None:
    """A replaced bus ends before the position: our readers start at the oldest record."""
    topic = await _filled(ground, 4)
    partition = TopicPartition(topic, 0)
    async with consuming(ground) as reader:
        reader.assign([partition])
        reader.seek(partition, 9)
        assert offsets(await take(reader, 4)) == [0, 1, 2, 3]


async def some_at_a_time(ground: Ground) -> None:
    """A fetch returns at most `max_records`, from the requested partitions, and in the end each record once."""
    topic = await _filled(ground, 30, 30, 30)
    records: list[Record] = []
    async with consuming(ground) as reader:
        partitions = await assign_all(reader, topic)
        for _ in range(12):
            records_max, polled = ground.draw.randint(1, 7), ground.draw.sample(partitions, ground.draw.randint(1, 2))
            batch = await poll(reader, *polled, records_max=records_max)
            assert len(batch) <= records_max
            assert {record.partition for record in batch} <= {partition.partition for partition in polled}
            records += batch
        records += await take(reader, 90 - len(records))
        assert await poll(reader) == []
    for partition in partitions:
        assert offsets(
            [record_read for record_read in records if record_read.partition == partition.partition]
        ) == list(range(30))


async def paused_places_wait(ground: Ground) -> None:
    """A pause holds fetched records back too; positions do not move, and resuming loses no record."""
    topic = await _filled(ground, 20, 20)
    async with consuming(ground) as reader:
        paused, open_ = await assign_all(reader, topic)
        before: list[Record] = []
        while len(before) < 3:
            before += await poll(reader, paused, records_max=1)
        reader.pause(paused)
        assert {record.partition for record in await take(reader, 20)} == {open_.partition}
        assert await poll(reader) == []
        assert await poll(reader, paused) == []
        assert await reader.position(paused) == 3
        reader.pause(paused)
        reader.resume(paused, open_)
        after = await take(reader, 17)
        assert offsets([*before, *after]) == list(range(20))


async def a_pause_survives_seeking(ground: Ground) -> None:
    topic = await _filled(ground, 5)
    partition = TopicPartition(topic, 0)
    async with consuming(ground) as reader:
        reader.assign([partition])
        reader.pause(partition)
        reader.seek(partition, 2)
        assert await poll(reader) == []
        reader.resume(partition)
        assert offsets(await take(reader, 3)) == [2, 3, 4]


async def assigning_forgets(ground: Ground) -> None:
    """Positions and pauses of the assignment before."""
    topic = await _filled(ground, 3, 3)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    async with consuming(ground) as reader:
        reader.assign([first])
        await take(reader, 3)
        reader.pause(first)
        reader.assign([first, second])
        assert sorted(values(await take(reader, 6)), key=str) == [b"0:0", b"0:1", b"0:2", b"1:0", b"1:1", b"1:2"]
        reader.assign([second])
        assert values(await take(reader, 3)) == [b"1:0", b"1:1", b"1:2"]


async def what_is_not_ours_is_refused(ground: Ground) -> None:
    topic = await _filled(ground, 1, 1)
    mine, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    async with consuming(ground) as reader:
        reader.assign([mine])
        with pytest.raises(IllegalStateError):
            reader.seek(other, 0)
        with pytest.raises(IllegalStateError):
            await reader.seek_to_beginning(other)
        with pytest.raises(IllegalStateError):
            await reader.position(other)
        with pytest.raises(IllegalStateError):
            reader.pause(other)
        with pytest.raises(IllegalStateError):
            reader.resume(other)
        with pytest.raises(ValueError, match="positive"):
            reader.seek(mine, -1)
        with pytest.raises(IllegalOperation):
            await reader.committed(mine)
        assert values(await take(reader, 1)) == [b"0:0"]
    with pytest.raises(ConsumerStoppedError):
        await reader.getmany(timeout_ms=0)


async def readers_do_not_meet(ground: Ground) -> None:
    """Without a group every reader reads all records, and a waiting reader receives new ones."""
    topic = await _filled(ground, 6)
    partition = TopicPartition(topic, 0)
    async with consuming(ground) as first_reader, consuming(ground) as other, producing(ground) as producer:
        first_reader.assign([partition])
        other.assign([partition])
        other.seek(partition, 4)
        assert offsets(await take(first_reader, 6)) == [0, 1, 2, 3, 4, 5]
        assert offsets(await take(other, 2)) == [4, 5]
        waiting = asyncio.create_task(take(first_reader, 2))
        await send(producer, topic, [b"a", b"b"])
        assert values(await waiting) == [b"a", b"b"]

        async def has_committed() -> bool:
            return bool((await other.end_offsets([partition]))[partition] == 8)

        await eventually(has_committed, "the end moves")
        assert await other.position(partition) == 6


READING: tuple[Scenario, ...] = (
    begin_end_and_position,
    unknown_topics_have_no_partitions,
    seek_anywhere,
    behind_the_end_starts_over,
    some_at_a_time,
    paused_places_wait,
    a_pause_survives_seeking,
    assigning_forgets,
    what_is_not_ours_is_refused,
    readers_do_not_meet,
)
