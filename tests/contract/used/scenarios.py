"""Scenarios of the bus behaviour that our producers and our readers without a group rely on.

Such readers are tables, the trainer's source, the registry's reader and offset requests.
"""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import (
    ConsumerStoppedError,
    IllegalOperation,
    IllegalStateError,
    MessageSizeTooLargeError,
    ProducerClosed,
)

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.consumer import assign_all, partitions_of
from headrace_runtime.kafka.wire import Record
from tests.contract.used.grounds import (
    Ground,
    Scenario,
    consuming,
    eventually,
    everything,
    offsets,
    poll,
    producing,
    send,
    take,
    values,
)


async def _filled(ground: Ground, *counts: int) -> str:
    """Create a topic with `counts` records in its partitions. Each record holds its partition and offset."""
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
    """Seek forward, backward, to the start and to the end. The position changes at once."""
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
    """The log of a replaced bus ends before the position, so our readers start at the oldest record."""
    topic = await _filled(ground, 4)
    partition = TopicPartition(topic, 0)
    async with consuming(ground) as reader:
        reader.assign([partition])
        reader.seek(partition, 9)
        assert offsets(await take(reader, 4)) == [0, 1, 2, 3]


async def some_at_a_time(ground: Ground) -> None:
    """A fetch returns at most `max_records` from the requested partitions, and repeated fetches return each record
    once."""
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
    """A pause also holds back fetched records. Positions do not change, and no record is lost after resuming."""
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
    """A new assignment discards the positions and pauses of the previous assignment."""
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
    """Without a group each reader reads all records, and a waiting reader receives new ones."""
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
    begin_end_and_position, unknown_topics_have_no_partitions, seek_anywhere, behind_the_end_starts_over,
    some_at_a_time, paused_places_wait, a_pause_survives_seeking, assigning_forgets, what_is_not_ours_is_refused,
    readers_do_not_meet,
)  # fmt: skip


_TOPIC_PARTITIONS = 5
_HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
"""Kafka's own examples of its murmur2."""


async def keys_choose_partitions(ground: Ground) -> None:
    """A key has the same partition on every bus and for Kafka's own clients, so a session's events share a
    partition."""
    topic = await ground.create(_TOPIC_PARTITIONS)
    random_keys = [ground.draw.randbytes(ground.draw.randint(0, 40)) for _ in range(40)]
    async with producing(ground) as producer:
        acks = [
            await producer.send(topic, b"v", key, None, headers=[]) for key in [*_HASHES, *random_keys, *random_keys]
        ]
        await asyncio.gather(*acks)
    partitions_of: dict[bytes | None, set[int]] = {}
    for records in await everything(ground, topic):
        for record in records:
            partitions_of.setdefault(record.key, set()).add(record.partition)
    for key, hashed in _HASHES.items():
        assert partitions_of[key] == {(hashed & 0x7FFFFFFF) % _TOPIC_PARTITIONS}, key
    assert all(len(partitions) == 1 for partitions in partitions_of.values())
    assert len(set().union(*partitions_of.values())) == _TOPIC_PARTITIONS


async def order_within_a_partition(ground: Ground) -> None:
    """Order also holds for records sent before any acknowledgement. Offsets have no gaps and begin at 0."""
    topic = await ground.create(3)
    sent: list[list[bytes | None]] = [[], [], []]
    async with producing(ground) as producer:
        acks = []
        for number in range(300):
            partition, value = ground.draw.randrange(3), b"%d" % number
            sent[partition].append(value)
            acks.append(await producer.send(topic, value, b"k", partition, headers=[]))
            if ground.draw.random() < 0.05:
                await asyncio.sleep(ground.draw.uniform(0, 0.01))
        answers = await asyncio.gather(*acks)
    logs = await everything(ground, topic)
    assert [values(records) for records in logs] == sent
    assert [offsets(records) for records in logs] == [list(range(len(messages))) for messages in sent]
    acknowledged = [[answer.offset for answer in answers if answer.partition == number] for number in range(3)]
    assert acknowledged == [list(range(len(messages))) for messages in sent], "acknowledgements say where the record is"


async def acknowledged_is_readable(ground: Ground) -> None:
    """An end offset that is requested after an acknowledgement includes the record."""
    topic = await ground.create(1)
    partition = TopicPartition(topic, 0)
    async with producing(ground) as producer, consuming(ground) as reader:
        reader.assign([partition])
        for number in range(15):
            answer = await (await producer.send(topic, b"%d" % number, b"k", None, headers=[]))
            assert answer.offset == number
            assert await reader.end_offsets([partition]) == {partition: number + 1}
            assert values(await take(reader, 1)) == [b"%d" % number]


async def null_is_not_empty(ground: Ground) -> None:
    topic = await ground.create(1)
    pairs = [(b"", b"v"), (None, b"v"), (b"k", b""), (b"k", None), (b"", b""), (b"", None), (None, b"")]
    async with producing(ground) as producer:
        with pytest.raises(AssertionError):
            await producer.send(topic, None, None, 0, headers=[])
        await asyncio.gather(*[await producer.send(topic, value, key, 0, headers=[]) for key, value in pairs])
    (log,) = await everything(ground, topic)
    assert [(record.key, record.value) for record in log] == pairs


async def headers_come_back(ground: Ground) -> None:
    """Headers keep their order, repeated names and arbitrary bytes, and the timestamp is kept."""
    topic = await ground.create(1)
    bytes_ = ground.draw.randbytes(50)
    kinds = [[], [("a", b"1"), ("b", b"2"), ("a", b"3")], [("ünïcode", "ä".encode()), ("empty", b"")], [("x", bytes_)]]
    async with producing(ground) as producer:
        answers = [
            await (await producer.send(topic, b"v", b"k", 0, headers=list(sent_headers))) for sent_headers in kinds
        ]
    (log,) = await everything(ground, topic)
    assert [list(record.headers) for record in log] == kinds
    assert [record.timestamp_ms for record in log] == [answer.timestamp for answer in answers]


async def too_large_is_refused_alone(ground: Ground) -> None:
    """An oversized record fails at once with a named error, and records sent with it arrive."""
    topic = await ground.create(1)
    async with producing(ground) as producer:
        before = await producer.send(topic, b"before", b"k", 0, headers=[])
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send(topic, bytes(1_048_576), b"k", 0, headers=[])
        await send(producer, topic, [b"after"])
        await before
    (log,) = await everything(ground, topic)
    assert values(log) == [b"before", b"after"]


async def stopping_flushes(ground: Ground) -> None:
    """After `stop`, all sent records are on the bus, and sending fails."""
    topic = await ground.create(2)
    async with producing(ground) as producer:
        for number in range(50):
            await producer.send(topic, b"%d" % number, b"k", number % 2, headers=[])
    with pytest.raises(ProducerClosed):
        await producer.send(topic, b"late", b"k", 0, headers=[])
    assert [len(records) for records in await everything(ground, topic)] == [25, 25]


async def partitions_are_known(ground: Ground) -> None:
    topic = await ground.create(4)
    async with producing(ground) as producer:
        assert await producer.partitions_for(topic) == {0, 1, 2, 3}


SENDING: tuple[Scenario, ...] = (
    keys_choose_partitions, order_within_a_partition, acknowledged_is_readable, null_is_not_empty, headers_come_back,
    too_large_is_refused_alone, stopping_flushes, partitions_are_known,
)  # fmt: skip
