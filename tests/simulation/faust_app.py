"""Faust as our stream host uses it: an app in a consumer group, one agent, events that are acknowledged one by one.

What makes a host's life hard is here: partitions that move while their events are being handled, partitions that stay
and are read again from the last commit, commits that lag behind acknowledgements, a queue that outlives a rebalance.

`tests/contract/used` holds it to what Faust does on the embedded broker and on Apache Kafka. Harsher than Faust on
purpose: the places of a rebalance are drawn, what a member keeps may be read again or not, a commit before partitions
go may fail to be made, and an acknowledgement that overtakes another of its partition is a fault. Faust takes it and
may commit past what is not acknowledged: it looks for gaps only behind the first acknowledgement that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

from headrace_runtime.settings import BusSettings
from tests.simulation.clients import connect, message_of
from tests.simulation.process import living
from tests.simulation.world import world

_COMMIT_INTERVAL_S = 1.0
_COMMITS_AT_ONCE = 0.2
"""How often the interval happens to end right after an acknowledgement."""
_QUEUE_MAX = 24


class Signal:
    """`app.on_partitions_assigned` and its like."""

    def __init__(self) -> None:
        self._handlers: list[Callable[..., Awaitable[None]]] = []

    def connect(self, handler: Callable[..., Awaitable[None]], *, weak: bool) -> None:
        self._handlers.append(handler)

    async def send(self) -> None:
        for handler in self._handlers:
            await handler()


@dataclass(frozen=True, slots=True)
class Event:
    """What the agent gets. Acknowledging one of a partition that has moved meanwhile does nothing."""

    message: Any
    place: TopicPartition
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
    """`faust.App`, a member of its group from `start` on."""

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
        """What was acknowledged last in each assignment."""
        self._tasks: list[asyncio.Task[None]] = []

    def topic(self, *names: str, **_options: Any) -> tuple[str, ...]:
        self._topics = names
        return names

    def agent(self, channel: tuple[str, ...], *, name: str) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
        def decorate(receive: Callable[[Any], Awaitable[None]]) -> None:
            self._receive = receive

        return decorate

    async def start(self) -> None:
        """Joins the group; waits for a bus that is away."""
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
        """The group notices a dead member only when it has been silent for long enough."""
        silence_s = self._bus.draw.uniform(1.0, 6.0)
        asyncio.get_running_loop().call_later(silence_s, self._group.leave, self)

    def revoked(self) -> None:
        """A living member commits before its partitions go, if the bus lets it."""
        if not self._process.dead and self._bus.draw.random() < 0.7:
            self._commit()
        self._later(self.on_partitions_revoked.send())

    def assigned(self, places: frozenset[TopicPartition]) -> None:
        """Read on where the group has committed; what is kept may go on where it was."""
        self._generation += 1
        kept = {place: at for place, at in self._next.items() if place in places and self._bus.draw.random() < 0.5}
        for place in sorted(places - kept.keys()):
            committed = self._group.committed.get(place, 0)
            self._next[place] = self._reached[place] = committed
            self._acked[place] = set()
        for place in sorted(self._next.keys() - places):
            del self._next[place], self._reached[place], self._acked[place]
        self._later(self.on_partitions_assigned.send())

    def acknowledge(self, event: Event) -> None:
        """Raises `AssertionError` when events of one assignment are not acknowledged in their order."""
        assignment = event.place, event.generation
        assert event.message.offset > self._last.get(assignment, -1), f"{event.place} is not acknowledged in order"
        self._last[assignment] = event.message.offset
        if event.place in self._acked and event.message.offset >= self._reached[event.place]:
            self._acked[event.place].add(event.message.offset)
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
            places = sorted(self._next)
            draw.shuffle(places)
            found = 0
            for place in places[: draw.randint(1, 4)]:
                if place in self._next:
                    found += await self._take(self._bus.read(place, self._next[place], draw.randint(1, 8)), place)
            await asyncio.sleep(self._bus.latency_s() if found else draw.uniform(0.1, 0.5))

    async def _take(self, records: Iterable[Any], place: TopicPartition) -> int:
        count = 0
        for record in records:
            if self._next.get(place) != record.offset:  # it was taken away, or is read again from further back
                break
            self._next[place] = record.offset + 1
            await self._queue.put(Event(message_of(record), place, self._generation, self))
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
        """Everything up to the first event that nobody has acknowledged."""
        if self._bus.away:
            return
        for place in sorted(self._reached):
            reached = self._reached[place]
            while reached in self._acked[place]:
                self._acked[place].discard(reached)
                reached += 1
            if reached != self._group.committed.get(place, 0) and reached > self._reached[place]:
                self._group.commit(self, place, reached)
            self._reached[place] = reached
