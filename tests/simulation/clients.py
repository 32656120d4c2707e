"""Producer and consumer of aiokafka on the simulated bus, as far as our runtime uses them.

Calls, exceptions and guarantees are aiokafka's: a producer keeps the order within a partition and, being idempotent,
never appends one send twice by itself; a consumer without a group starts at its assigned offset. `tests/contract/used`
compares them with the embedded broker and Apache Kafka.

They are stricter than the originals on purpose: a fetch returns a part of the available records, from partitions in any
order; `Bus.repeat` sends twice, as a retrying service above the producer does; `Bus.hold` delays records. They are more
lenient in one point: a record without a key goes to partition 0 instead of a random one; our runtime always sends a
key.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import (
    ConsumerStoppedError,
    IllegalOperation,
    IllegalStateError,
    KafkaConnectionError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    ProducerClosed,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import RecordMetadata

from headrace_runtime.kafka.wire import Record
from tests.simulation.bus import Bus
from tests.simulation.process import Process, living, world

_IN_FLIGHT = 0.3
"""Probability that a record that a dying process was about to send reaches the bus."""
_OVERHEAD = 21
"""Bytes that aiokafka counts for a record in addition to its key, its value and its headers."""


async def connect(bus: Bus) -> None:
    """Wait as for a new connection. Raises `KafkaConnectionError` during an outage."""
    living()
    await asyncio.sleep(bus.latency_s())
    if bus.away:
        await asyncio.sleep(0.5)
        raise KafkaConnectionError("the bus is away")


async def ask(bus: Bus, timeout_s: float) -> None:
    """Wait as for a request with an answer. Raises `KafkaTimeoutError` if the outage does not end in time."""
    living()
    deadline = asyncio.get_running_loop().time() + timeout_s
    await asyncio.sleep(bus.latency_s())
    while bus.away:
        if asyncio.get_running_loop().time() > deadline:
            raise KafkaTimeoutError("no answer from the bus")
        await asyncio.sleep(0.25)
    living()


@dataclass(slots=True)
class _Send:
    topic_partition: TopicPartition
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    future: asyncio.Future[RecordMetadata] = field(repr=False)
    answer: RecordMetadata | None = None
    """Partition and offset of the record on the bus."""


class Producer:
    """Replacement of `aiokafka.AIOKafkaProducer`."""

    def __init__(self, *, max_request_size: int = 1_048_576, **options: Any) -> None:
        self._bus = world().bus
        self._process: Process = living()
        self._size_max = max_request_size
        self._closed = False
        self._waiting: dict[TopicPartition, deque[_Send]] = defaultdict(deque)
        # What `EventProducer.abandon` uses of aiokafka.
        self._sender = SimpleNamespace(sender_task=None)
        self._message_accumulator = SimpleNamespace(fail_all=self._discard)

    async def start(self) -> None:
        await connect(self._bus)

    async def flush(self) -> None:
        """Send all records, which never ends if the bus stays away."""
        while any(self._waiting.values()):
            living()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self._closed = True
        await self.flush()

    def _discard(self, error: Exception) -> None:
        for sends in self._waiting.values():
            while sends:
                _finish(sends.popleft().future, error)

    async def send(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int | None, headers: list[Any]
    ) -> asyncio.Future[RecordMetadata]:
        living()
        assert not (value is None and key is None), "Need at least one: key or value"
        if self._closed:
            raise ProducerClosed
        if topic not in self._bus.logs:
            await asyncio.sleep(world().request_timeout_s)  # it might yet be created
            raise UnknownTopicOrPartitionError
        if len(key or b"") + len(value or b"") + _OVERHEAD > self._size_max:
            raise MessageSizeTooLargeError
        number = self._bus.partition_of(topic, key) if partition is None else partition
        topic_partition = TopicPartition(topic, number)
        sending = _Send(topic_partition, key, value, tuple(headers), asyncio.get_running_loop().create_future())
        self._waiting[topic_partition].append(sending)
        if len(self._waiting[topic_partition]) == 1:
            self._later(topic_partition)
        return sending.future

    async def partitions_for(self, topic: str) -> set[int]:
        await ask(self._bus, world().request_timeout_s)
        if topic not in self._bus.logs:
            raise UnknownTopicOrPartitionError
        return {topic_partition.partition for topic_partition in self._bus.partitions_of(topic)}

    def _later(self, topic_partition: TopicPartition, after_s: float = 0.0) -> None:
        asyncio.get_running_loop().call_later(after_s + self._bus.latency_s(), self._carry_out, topic_partition)

    def _carry_out(self, topic_partition: TopicPartition) -> None:
        """Execute the oldest request of a partition, or let it fail."""
        bus, sends = self._bus, self._waiting[topic_partition]
        if self._process.dead:
            if sends and not bus.away and bus.draw.random() < _IN_FLIGHT:
                self._append(sends[0])
            return
        if not sends:
            return
        if not bus.away:
            self._append(sends[0])
            asyncio.get_running_loop().call_later(bus.latency_s(), self._acknowledge, topic_partition)
        elif bus.outage.how == "silent":
            self._later(topic_partition, bus.outage.until_s - asyncio.get_running_loop().time())
        else:
            self._fail(topic_partition)

    def _append(self, sending: _Send) -> None:
        bus = self._bus
        times = 2 if bus.draw.random() < bus.repeat else 1
        for _ in range(times):
            record = bus.append(
                sending.topic_partition, sending.key, sending.value, sending.headers, self._process.name
            )
            if sending.answer is None:
                sending.answer = RecordMetadata(
                    *sending.topic_partition, sending.topic_partition, record.offset, record.timestamp_ms, 0, 0
                )
        if times > 1:
            world().count("duplicate")

    def _acknowledge(self, topic_partition: TopicPartition) -> None:
        if self._process.dead:
            return
        if self._bus.away:  # what was appended, and what waits behind it, hears nothing until the bus is back
            if self._bus.outage.how == "refusing":
                self._fail(topic_partition)
            else:
                wait_s = self._bus.outage.until_s - asyncio.get_running_loop().time()
                asyncio.get_running_loop().call_later(wait_s, self._acknowledge, topic_partition)
            return
        sends = self._waiting[topic_partition]
        if not sends:
            return
        sending = sends.popleft()
        assert sending.answer is not None, "only what was appended is acknowledged"
        _finish(sending.future, sending.answer)
        if sends:
            self._later(topic_partition)

    def _fail(self, topic_partition: TopicPartition) -> None:
        sends = self._waiting[topic_partition]
        while sends:
            _finish(sends.popleft().future, RequestTimedOutError())


def _finish(future: asyncio.Future[RecordMetadata], answer: RecordMetadata | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
        future.exception()  # nobody may be waiting any more
    else:
        future.set_result(answer)


class Consumer:
    """Replacement of `aiokafka.AIOKafkaConsumer`, with partitions assigned by hand or for requests alone."""

    def __init__(self, *, group_id: str | None = None, **options: Any) -> None:
        self._bus = world().bus
        self._process = living()
        self._group_id = group_id
        self._next: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._closed = False
        self._client = SimpleNamespace(fetch_all_metadata=self._metadata)

    async def start(self) -> None:
        await connect(self._bus)

    async def stop(self) -> None:
        living()
        self._closed = True

    async def _metadata(self) -> Any:
        await ask(self._bus, world().request_timeout_s)
        return SimpleNamespace(partitions_for_topic=self.partitions_for_topic)

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        if topic not in self._bus.logs:
            return None
        return {topic_partition.partition for topic_partition in self._bus.partitions_of(topic)}

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Start at the group's committed offset, else at the oldest record (`auto_offset_reset`)."""
        committed = self._bus.group(self._group_id).committed if self._group_id is not None else {}
        self._next = {topic_partition: committed.get(topic_partition, 0) for topic_partition in partitions}
        self._paused.clear()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        if offset < 0:
            raise ValueError("Offset must be a positive integer")
        self._assigned(topic_partition)
        self._next[topic_partition] = offset

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self._assigned(*partitions)
        for topic_partition in partitions:
            self._next[topic_partition] = 0

    def pause(self, *partitions: TopicPartition) -> None:
        self._assigned(*partitions)
        self._paused.update(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self._assigned(*partitions)
        self._paused.difference_update(partitions)

    async def position(self, topic_partition: TopicPartition) -> int:
        self._assigned(topic_partition)
        return self._next[topic_partition]

    def _assigned(self, *partitions: TopicPartition) -> None:
        for topic_partition in partitions:
            if topic_partition not in self._next:
                raise IllegalStateError(f"Partition {topic_partition} is not assigned")

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        await ask(self._bus, world().request_timeout_s)
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        await ask(self._bus, world().request_timeout_s)
        return {topic_partition: self._bus.end(topic_partition) for topic_partition in partitions}

    async def committed(self, topic_partition: TopicPartition) -> int | None:
        if self._group_id is None:
            raise IllegalOperation("Requires group_id")
        await ask(self._bus, world().request_timeout_s)
        return self._bus.group(self._group_id).committed.get(topic_partition)

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """Return a part of the available records, in any order of partitions; an empty result while the bus is away."""
        living()
        if self._closed:
            raise ConsumerStoppedError
        records = self._fetch(partitions, max_records or 1000)
        await asyncio.sleep(self._bus.latency_s() if records else timeout_ms / 1000)
        living()
        return records or self._fetch(partitions, max_records or 1000)

    def _fetch(self, partitions: Sequence[TopicPartition], records_left: int) -> dict[TopicPartition, list[Any]]:
        chosen = [
            topic_partition for topic_partition in partitions or self._next if topic_partition not in self._paused
        ]
        self._bus.draw.shuffle(chosen)
        fetched: dict[TopicPartition, list[Any]] = {}
        for topic_partition in chosen:
            if self._next[topic_partition] > self._bus.end(
                topic_partition
            ):  # out of range: the reset that our readers ask for
                self._next[topic_partition] = 0
            limit = min(records_left, self._bus.draw.randint(1, 12))
            records = self._bus.read(topic_partition, self._next[topic_partition], limit) if limit else []
            if records:
                fetched[topic_partition] = [message_of(record) for record in records]
                self._next[topic_partition] += len(records)
                records_left -= len(records)
        return fetched


def message_of(record: Record) -> Any:
    """Return a record in the form that aiokafka and Faust return."""
    return SimpleNamespace(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value,
        headers=record.headers,
        timestamp=record.timestamp_ms,
        timestamp_ms=record.timestamp_ms,
    )
