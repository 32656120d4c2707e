"""aiokafka's producer and consumer on the simulated bus, as far as our runtime uses them.

The same calls, the same exceptions, and the same guarantees: a producer keeps the order within a partition and, being
idempotent, never appends one send twice by itself; a consumer without a group reads from where it was told to.
`tests/contract/used` holds them to what the embedded broker and Apache Kafka promise.

Harsher than the real ones on purpose: what a fetch finds is only some of what is there, from partitions in any order;
`Bus.repeat` sends twice, as a retrying service above the producer does; `Bus.hold` shows records late. Kinder: a record
without a key goes to partition 0, where aiokafka draws one; our runtime always sends a key.
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

from headrace_runtime.wire import Record
from tests.simulation.bus import Bus
from tests.simulation.process import Process, living
from tests.simulation.world import world

_IN_FLIGHT = 0.3
"""How often a record that a dying process was about to send has left it already."""
_OVERHEAD = 21
"""Bytes that aiokafka counts for a record beside its key, its value and its headers."""


async def connect(bus: Bus) -> None:
    """Raises `KafkaConnectionError` while the bus is away."""
    living()
    await asyncio.sleep(bus.latency_s())
    if bus.away:
        await asyncio.sleep(0.5)
        raise KafkaConnectionError("the bus is away")


async def ask(bus: Bus, timeout_s: float) -> None:
    """One request that needs an answer. Raises `KafkaTimeoutError` when the bus does not come back in time."""
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
    place: TopicPartition
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    done: asyncio.Future[RecordMetadata] = field(repr=False)
    answer: RecordMetadata | None = None
    """Where it is on the bus."""


class Producer:
    """`aiokafka.AIOKafkaProducer`."""

    def __init__(self, *, max_request_size: int = 1_048_576, **options: Any) -> None:
        self._bus = world().bus
        self._process: Process = living()
        self._size_max = max_request_size
        self._closed = False
        self._waiting: dict[TopicPartition, deque[_Send]] = defaultdict(deque)

    async def start(self) -> None:
        await connect(self._bus)

    async def stop(self) -> None:
        """Flushes, for ever when the bus stays away."""
        self._closed = True
        while any(self._waiting.values()):
            living()
            await asyncio.sleep(0.05)

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
        place = TopicPartition(topic, number)
        one = _Send(place, key, value, tuple(headers), asyncio.get_running_loop().create_future())
        self._waiting[place].append(one)
        if len(self._waiting[place]) == 1:
            self._later(place)
        return one.done

    async def partitions_for(self, topic: str) -> set[int]:
        await ask(self._bus, world().request_timeout_s)
        if topic not in self._bus.logs:
            raise UnknownTopicOrPartitionError
        return {place.partition for place in self._bus.places(topic)}

    def _later(self, place: TopicPartition, after_s: float = 0.0) -> None:
        asyncio.get_running_loop().call_later(after_s + self._bus.latency_s(), self._carry_out, place)

    def _carry_out(self, place: TopicPartition) -> None:
        """The oldest request of a partition reaches the bus, or does not."""
        bus, sends = self._bus, self._waiting[place]
        if self._process.dead:
            if sends and not bus.away and bus.draw.random() < _IN_FLIGHT:
                self._append(sends[0])
            return
        if not bus.away:
            self._append(sends[0])
            asyncio.get_running_loop().call_later(bus.latency_s(), self._acknowledge, place)
        elif bus.outage.how == "silent":
            self._later(place, bus.outage.until_s - asyncio.get_running_loop().time())
        else:
            self._fail(place)

    def _append(self, one: _Send) -> None:
        bus = self._bus
        times = 2 if bus.draw.random() < bus.repeat else 1
        for _ in range(times):
            record = bus.append(one.place, one.key, one.value, one.headers, self._process.name)
            if one.answer is None:
                one.answer = RecordMetadata(*one.place, one.place, record.offset, record.timestamp_ms, 0, 0)
        if times > 1:
            world().count("duplicate")

    def _acknowledge(self, place: TopicPartition) -> None:
        if self._process.dead:
            return
        if self._bus.away:  # what was appended, and what waits behind it, hears nothing until the bus is back
            if self._bus.outage.how == "refusing":
                self._fail(place)
            else:
                wait_s = self._bus.outage.until_s - asyncio.get_running_loop().time()
                asyncio.get_running_loop().call_later(wait_s, self._acknowledge, place)
            return
        sends = self._waiting[place]
        one = sends.popleft()
        assert one.answer is not None, "only what was appended is acknowledged"
        _finish(one.done, one.answer)
        if sends:
            self._later(place)

    def _fail(self, place: TopicPartition) -> None:
        sends = self._waiting[place]
        while sends:
            _finish(sends.popleft().done, RequestTimedOutError())


def _finish(done: asyncio.Future[RecordMetadata], answer: RecordMetadata | Exception) -> None:
    if done.done():
        return
    if isinstance(answer, Exception):
        done.set_exception(answer)
        done.exception()  # nobody may be waiting any more
    else:
        done.set_result(answer)


class Consumer:
    """`aiokafka.AIOKafkaConsumer` with partitions assigned by hand, or only asking."""

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
        return {place.partition for place in self._bus.places(topic)}

    def assign(self, places: Sequence[TopicPartition]) -> None:
        """Begins anew: where the group has committed, else at the oldest record (`auto_offset_reset`)."""
        committed = self._bus.group(self._group_id).committed if self._group_id is not None else {}
        self._next = {place: committed.get(place, 0) for place in places}
        self._paused.clear()

    def seek(self, place: TopicPartition, offset: int) -> None:
        if offset < 0:
            raise ValueError("Offset must be a positive integer")
        self._assigned(place)
        self._next[place] = offset

    async def seek_to_beginning(self, *places: TopicPartition) -> None:
        self._assigned(*places)
        for place in places:
            self._next[place] = 0

    def pause(self, *places: TopicPartition) -> None:
        self._assigned(*places)
        self._paused.update(places)

    def resume(self, *places: TopicPartition) -> None:
        self._assigned(*places)
        self._paused.difference_update(places)

    async def position(self, place: TopicPartition) -> int:
        self._assigned(place)
        return self._next[place]

    def _assigned(self, *places: TopicPartition) -> None:
        for place in places:
            if place not in self._next:
                raise IllegalStateError(f"Partition {place} is not assigned")

    async def beginning_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        await ask(self._bus, world().request_timeout_s)
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        await ask(self._bus, world().request_timeout_s)
        return {place: self._bus.end(place) for place in places}

    async def committed(self, place: TopicPartition) -> int | None:
        if self._group_id is None:
            raise IllegalOperation("Requires group_id")
        await ask(self._bus, world().request_timeout_s)
        return self._bus.group(self._group_id).committed.get(place)

    async def getmany(
        self, *places: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """Some of what is there, partition by partition, in any order of partitions; nothing while the bus is away."""
        living()
        if self._closed:
            raise ConsumerStoppedError
        found = self._fetch(places, max_records or 1000)
        await asyncio.sleep(self._bus.latency_s() if found else timeout_ms / 1000)
        living()
        return found or self._fetch(places, max_records or 1000)

    def _fetch(self, places: Sequence[TopicPartition], room: int) -> dict[TopicPartition, list[Any]]:
        chosen = [place for place in places or self._next if place not in self._paused]
        self._bus.draw.shuffle(chosen)
        found: dict[TopicPartition, list[Any]] = {}
        for place in chosen:
            if self._next[place] > self._bus.end(place):  # out of range: the reset that our readers ask for
                self._next[place] = 0
            limit = min(room, self._bus.draw.randint(1, 12))
            records = self._bus.read(place, self._next[place], limit) if limit else []
            if records:
                found[place] = [message_of(record) for record in records]
                self._next[place] += len(records)
                room -= len(records)
        return found


def message_of(record: Record) -> Any:
    """What aiokafka and Faust hand out for a record."""
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
