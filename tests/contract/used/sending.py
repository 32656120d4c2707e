"""Behaviour that our producers rely on."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, ProducerClosed

from tests.contract.used.ground import (
    Ground,
    Scenario,
    consuming,
    everything,
    offsets,
    producing,
    send,
    take,
    values,
)

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
    """The partition of a key is equal on every bus and for Kafka's own clients: a session's events meet in one
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
    """Order holds also for records sent before any acknowledgement. Offsets are dense and begin at 0."""
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
    """In order, with names that come twice, and bytes of any kind; so does the time."""
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
    """An oversized record fails at once and by name, and records sent with it arrive."""
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
    """After a stop all sent records are on the bus, and sending fails."""
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
    keys_choose_partitions,
    order_within_a_partition,
    acknowledged_is_readable,
    null_is_not_empty,
    headers_come_back,
    too_large_is_refused_alone,
    stopping_flushes,
    partitions_are_known,
)
