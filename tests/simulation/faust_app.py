"""Faust on the simulated bus as our stream host uses it, and the replacements of Kafka's client libraries, by name.

It causes the difficulties of a real app: partitions that move while their events are processed, partitions that stay
and are read again from the last commit, commits that lag behind acknowledgements, a queue that survives a rebalance.

`tests/contract/used` compares it with Faust on the embedded broker and on Apache Kafka. It is stricter than Faust on
purpose: the assignment of a rebalance is random, a retained partition may be read again or not, a commit before a
revocation may be left out, and an acknowledgement that overtakes another of its partition is an error. Faust accepts
that and may commit past unacknowledged events: it looks for gaps only behind its first acknowledgement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

from headrace_runtime.settings.sections import BusSettings
from tests.simulation import clients
from tests.simulation.clients import connect, message_of
from tests.simulation.process import living, world

_COMMIT_INTERVAL_S = 1.0
_COMMITS_AT_ONCE = 0.2
"""Probability that the commit interval ends right after an acknowledgement."""
_QUEUE_MAX = 24


class Signal:
    """Signal of the app, such as `app.on_partitions_assigned`."""

    def __init__(self) -> None:
        self._handlers: list[Callable[..., Awaitable[None]]] = []

    def connect(self, handler: Callable[..., Awaitable[None]], *, weak: bool) -> None:
        self._handlers.append(handler)

    async def send(self) -> None:
        for handler in self._handlers:
            await handler()


@dataclass(frozen=True, slots=True)
class Event:
    """Event that the agent receives. Acknowledging an event of a revoked partition has no effect."""

    message: Any
    topic_partition: TopicPartition
    generation: int
    app: App

    def ack(self) -> None:
        self.app.acknowledge(self)


class _Stream:
    def __init__(self, queue: asyncio.Queue[Event]) -> None:
        self._queue = queue

    def noack(self) -> _Stream:
        return self

    async def events(self) -> AsyncIterator[Event]:
        while True:
            yield await self._queue.get()


class App:
    """Replacement of `faust.App`; it is a member of its group from `start` on."""

    crashed = False
    should_stop = False
    crash_reason: BaseException | None = None

    def __init__(self, group: str, _bus: BusSettings, _folder: Path) -> None:
        self._bus = world().bus
        self._process = living()
        self._group = self._bus.group(group)
        self.name = f"{self._process.name}/{self._process.life}"
        self.conf = SimpleNamespace(id=group)
        self.on_partitions_assigned = Signal()
        self.on_partitions_revoked = Signal()
        self._topics: tuple[str, ...] = ()
        self._receive: Callable[[Any], Awaitable[None]] | None = None
        self._queue: asyncio.Queue[Event] = asyncio.Queue(_QUEUE_MAX)
        self._generation = 0
        self._next: dict[TopicPartition, int] = {}
        self._acked: dict[TopicPartition, set[int]] = {}
        self._reached: dict[TopicPartition, int] = {}
        self._last: dict[tuple[TopicPartition, int], int] = {}
        """Last acknowledged offset of each assignment."""
        self._tasks: list[asyncio.Task[None]] = []

    def topic(self, *names: str, **_options: Any) -> tuple[str, ...]:
        self._topics = names
        return names

    def agent(self, channel: tuple[str, ...], *, name: str) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
        def decorate(receive: Callable[[Any], Awaitable[None]]) -> None:
            self._receive = receive

        return decorate

    async def start(self) -> None:
        """Join the group. Wait during an outage."""
        while True:
            try:
                await connect(self._bus)
                break
            except KafkaConnectionError:
                await asyncio.sleep(0.5)
        assert self._receive is not None

        async def receive() -> None:
            assert self._receive is not None
            await self._receive(_Stream(self._queue))

        self._process.at_death.append(self._time_out)
        self._tasks = [self._process.spawn(work) for work in (receive(), self._fetch(), self._commit_often())]
        self._group.join(self, self._topics)

    async def stop(self) -> None:
        living()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._commit()
            self._group.leave(self)

    def _time_out(self) -> None:
        """Remove a dead member from the group, after the session timeout."""
        silence_s = self._bus.draw.uniform(1.0, 6.0)
        asyncio.get_running_loop().call_later(silence_s, self._group.leave, self)

    def revoked(self) -> None:
        """Commit before the partitions are revoked, if the process lives and the bus answers."""
        if not self._process.dead and self._bus.draw.random() < 0.7:
            self._commit()
        self._later(self.on_partitions_revoked.send())

    def assigned(self, assignment: frozenset[TopicPartition]) -> None:
        """Continue at the group's committed offset; a retained partition may continue at its own position."""
        self._generation += 1
        continued = {
            topic_partition: at
            for topic_partition, at in self._next.items()
            if topic_partition in assignment and self._bus.draw.random() < 0.5
        }
        for topic_partition in sorted(assignment - continued.keys()):
            committed = self._group.committed.get(topic_partition, 0)
            self._next[topic_partition] = self._reached[topic_partition] = committed
            self._acked[topic_partition] = set()
        for topic_partition in sorted(self._next.keys() - assignment):
            del self._next[topic_partition], self._reached[topic_partition], self._acked[topic_partition]
        self._later(self.on_partitions_assigned.send())

    def acknowledge(self, event: Event) -> None:
        """Acknowledge an event. Raises `AssertionError` if an earlier event of the assignment is unacknowledged."""
        assignment = event.topic_partition, event.generation
        assert event.message.offset > self._last.get(assignment, -1), (
            f"{event.topic_partition} is not acknowledged in order"
        )
        self._last[assignment] = event.message.offset
        if event.topic_partition in self._acked and event.message.offset >= self._reached[event.topic_partition]:
            self._acked[event.topic_partition].add(event.message.offset)
            if self._bus.draw.random() < _COMMITS_AT_ONCE:
                asyncio.get_running_loop().call_soon(self._commit_if_alive)

    def _later(self, work: Any) -> None:
        if self._process.dead:
            work.close()
        else:
            self._process.spawn(work)

    async def _fetch(self) -> None:
        draw = self._bus.draw
        while True:
            living()
            assignment = sorted(self._next)
            draw.shuffle(assignment)
            count = 0
            for topic_partition in assignment[: draw.randint(1, 4)]:
                if topic_partition in self._next:
                    count += await self._take(
                        self._bus.read(topic_partition, self._next[topic_partition], draw.randint(1, 8)),
                        topic_partition,
                    )
            await asyncio.sleep(self._bus.latency_s() if count else draw.uniform(0.1, 0.5))

    async def _take(self, records: Iterable[Any], topic_partition: TopicPartition) -> int:
        count = 0
        for record in records:
            if (
                self._next.get(topic_partition) != record.offset
            ):  # it was taken away, or is read again from further back
                break
            self._next[topic_partition] = record.offset + 1
            await self._queue.put(Event(message_of(record), topic_partition, self._generation, self))
            count += 1
        return count

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_INTERVAL_S)
            self._commit()

    def _commit_if_alive(self) -> None:
        if not self._process.dead:
            self._commit()

    def _commit(self) -> None:
        """Commit the offset before the first unacknowledged event."""
        if self._bus.away:
            return
        for topic_partition in sorted(self._reached):
            reached = self._reached[topic_partition]
            while reached in self._acked[topic_partition]:
                self._acked[topic_partition].discard(reached)
                reached += 1
            if reached != self._group.committed.get(topic_partition, 0) and reached > self._reached[topic_partition]:
                self._group.commit(self, topic_partition, reached)
            self._reached[topic_partition] = reached


STANDS_FOR: Mapping[str, object] = {
    "headrace_runtime.kafka.producer.AIOKafkaProducer": clients.Producer,
    "headrace_runtime.kafka.consumer.AIOKafkaConsumer": clients.Consumer,
    "headrace_runtime.stream.stream_service._app": App,
}
