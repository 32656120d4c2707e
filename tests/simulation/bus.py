"""Servers in memory: a Kafka cluster with logs, consumer groups and faults, and a database with one writer and failing
connections.

`Log` reads the events for checkers: each record is read once, and records that are no events are skipped.

Services use it through SQLAlchemy and our own driver and transactions. Processes share a server as they would share
PostgreSQL. The service's own migrations create the tables once; they are copied for every run.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar

from aiokafka import TopicPartition
from aiokafka.partitioner import murmur2
from sqlalchemy import NullPool, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.topics import catalogue
from headrace_runtime.kafka.wire import RawHeaders, Record
from headrace_runtime.storage import database
from headrace_runtime.storage.database import Database, Driver
from headrace_schemas import Event
from tests.simulation.process import CURRENT, START, Killed, Process, Trace, world

Away = Literal["silent", "refusing"]
"""Kind of an outage: requests hang and are executed at its end, or they fail, although some of them were executed."""

_LATENCY_S = 0.002
_PARTITIONS_MAX = 3


@dataclass(slots=True)
class Outage:
    """An outage of the bus: its end, and its kind."""

    until_s: float = 0.0
    how: Away = "silent"


class Bus:
    """Topics as in `topics.yaml`, with fewer partitions where there are many. `draw` is the source of randomness."""

    def __init__(self, draw: random.Random, trace: Trace) -> None:
        self.draw = draw
        self.trace = trace
        self.logs: dict[str, list[list[Record]]] = {
            name: [[] for _ in range(min(topic.partitions, _PARTITIONS_MAX))] for name, topic in catalogue().items()
        }
        self.groups: dict[str, Group] = {}
        self.outage = Outage()
        self.slow_s = 0.0
        """Additional latency of each request in seconds."""
        self.repeat = 0.0
        """Share of records that their producer sends twice."""
        self.first: dict[str, int] = {}
        """Number of records on all topics before each event id first appeared."""
        self._appended = 0
        self.held_back: dict[TopicPartition, tuple[float, int]] = {}
        """Partitions whose new records are hidden from consumers: the end of the delay, and the last visible offset
        until then.
        """

    def create(self, topic: str, partitions: int) -> None:
        """Add a topic that is not in `topics.yaml`."""
        self.logs[topic] = [[] for _ in range(partitions)]

    @property
    def away(self) -> bool:
        return asyncio.get_running_loop().time() < self.outage.until_s

    def latency_s(self) -> float:
        return self.draw.expovariate(1 / (_LATENCY_S + self.slow_s)) + 1e-4

    def partition_of(self, topic: str, key: bytes | None) -> int:
        """Return the partition of a key, as Kafka's own clients and aiokafka choose it."""
        count = len(self.logs[topic])
        return (murmur2(key) & 0x7FFFFFFF) % count if key is not None else 0

    def partitions_of(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for number in range(len(self.logs[topic]))]

    def append(
        self, topic_partition: TopicPartition, key: bytes | None, value: bytes | None, headers: RawHeaders, by: str
    ) -> Record:
        log = self.logs[topic_partition.topic][topic_partition.partition]
        at_ms = round((START.timestamp() + asyncio.get_running_loop().time()) * 1000)
        record = Record(topic_partition.topic, topic_partition.partition, len(log), key, value, headers, at_ms)
        log.append(record)
        self.first.setdefault(_id_of(headers), self._appended)
        self._appended += 1
        content = repr((key, headers)).encode() + (value or b"")
        self.trace(
            "append",
            topic_partition.topic,
            topic_partition.partition,
            record.offset,
            by,
            _id_of(headers),
            content=content,
        )
        return record

    def end(self, topic_partition: TopicPartition) -> int:
        return len(self.logs[topic_partition.topic][topic_partition.partition])

    def hold(self, topic_partition: TopicPartition, seconds: float) -> None:
        """Hide records that are appended from now on from consumers for `seconds`."""
        self.held_back[topic_partition] = (asyncio.get_running_loop().time() + seconds, self.end(topic_partition))

    def read(self, topic_partition: TopicPartition, offset: int, limit: int) -> list[Record]:
        """Return the records of a fetch, or an empty list during an outage."""
        if self.away:
            return []
        until_s, seen = self.held_back.get(topic_partition, (0.0, 0))
        end = seen if asyncio.get_running_loop().time() < until_s else self.end(topic_partition)
        return self.logs[topic_partition.topic][topic_partition.partition][offset : min(end, offset + limit)]

    def records(self, topic: str) -> Iterable[Record]:
        """Return all records of a topic, partition by partition."""
        return (record for log in self.logs[topic] for record in log)

    def group(self, name: str) -> Group:
        if name not in self.groups:
            self.groups[name] = Group(name, self)
        return self.groups[name]


def _id_of(headers: RawHeaders) -> str:
    return next(((value or b"").decode() for name, value in headers if name == "ce_id"), "?")


class Member(Protocol):
    """Interface of a consumer in a group."""

    name: str

    def revoked(self) -> None:
        """Revoke the member's partitions. It may still commit."""

    def assigned(self, partitions_of: frozenset[TopicPartition]) -> None:
        """Assign the partitions `partitions_of` to the member."""


class Group:
    """Consumer group: the assignment of partitions and the committed offsets."""

    def __init__(self, name: str, bus: Bus) -> None:
        self.name = name
        self._bus = bus
        self.committed: dict[TopicPartition, int] = {}
        self.members: dict[Member, frozenset[str]] = {}
        """Subscribed topics of each member."""
        self.owners: dict[TopicPartition, Member] = {}

    def join(self, member: Member, topics: Iterable[str]) -> None:
        self.members[member] = frozenset(topics)
        self.rebalance()

    def leave(self, member: Member) -> None:
        if self.members.pop(member, None) is not None:
            self.rebalance()

    def commit(self, member: Member, topic_partition: TopicPartition, offset: int) -> None:
        """Commit an offset. A member that no longer owns the partition is fenced."""
        if self.owners.get(topic_partition) is member:
            self.committed[topic_partition] = offset
            self._bus.trace("commit", self.name, topic_partition.topic, topic_partition.partition, offset)

    def rebalance(self) -> None:
        """Assign the partitions anew. Partitions with equal numbers go to the same member, as with Faust's assignor."""
        for member in self.members:
            member.revoked()
        self.owners = {}
        topics = sorted(frozenset().union(*self.members.values()))
        members = list(self.members)
        by_member: dict[Member, set[TopicPartition]] = defaultdict(set)
        self._bus.draw.shuffle(members)
        for topic in topics if members else ():
            for topic_partition in self._bus.partitions_of(topic):
                owner = members[topic_partition.partition % len(members)]
                self.owners[topic_partition] = owner
                by_member[owner].add(topic_partition)
        dealt = {member.name: sorted((p.topic, p.partition) for p in by_member[member]) for member in members}
        self._bus.trace("rebalance", self.name, sorted(dealt.items()))
        for member in members:
            member.assigned(frozenset(by_member[member]))


E = TypeVar("E", bound=Event)


class Log:
    """View of an observer that reads every topic from the beginning."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._read: dict[tuple[str, int], list[Event | None]] = {}

    def raw(self, kind: type[E], partition: int) -> list[E | None]:
        """Return the events of one partition by offset, None where a record is no event."""
        decoded: list[E | None] = self._read.setdefault((kind.topic, partition), [])  # type: ignore[assignment]
        new = self._bus.logs[kind.topic][partition][len(decoded) :]
        decoded.extend(_event(kind, record.value) for record in new)
        return decoded

    def partitions(self, kind: type[E]) -> list[list[E]]:
        """Return all events of a topic, including repeated ones, by partition and in order."""
        numbers = range(len(self._bus.logs[kind.topic]))
        return [[event for event in self.raw(kind, number) if event is not None] for number in numbers]

    def all(self, kind: type[E]) -> Sequence[E]:
        """Return each event once, in order within its partition."""
        events = (event for partition in self.partitions(kind) for event in partition)
        return list({event.event_id: event for event in events}.values())


def _event(kind: type[E], value: bytes | None) -> E | None:
    try:
        return kind.from_json(value or b"")
    except InvalidEvent:
        return None


class Server:
    """Database of one service."""

    def __init__(self, picture: bytes | None = None) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if picture is not None:
            self.connection.deserialize(picture)
        self._lock = asyncio.Lock()
        self.holder: Session | None = None
        self._changes = 0

    @property
    def changed(self) -> bool:
        """Return whether the running transaction has written rows."""
        return self.connection.total_changes != self._changes

    async def begin(self, session: Session) -> None:
        await self._lock.acquire()
        self.holder = session
        try:
            session.check()
            self.connection.execute("BEGIN IMMEDIATE")
            self._changes = self.connection.total_changes
        except BaseException:
            self.release(session)
            raise

    def release(self, session: Session) -> None:
        """Roll back the session's transaction, if there is one."""
        if self.holder is session:
            if self.connection.in_transaction:
                self.connection.rollback()
            self.holder = None
            self._lock.release()

    def commit(self, session: Session) -> None:
        if self.holder is session:
            self.connection.commit()
            self.release(session)


class Session:
    """Connection of one process, in place of aiosqlite's `Connection`."""

    _connection = True

    def __init__(self, server: Server, process: Process | None) -> None:
        self._server = server
        self._process = process
        self._conn = server.connection
        self.isolation_level = None

    def check(self) -> None:
        if self._process is not None and self._process.dead:
            raise Killed(self._process.name)

    async def begin(self) -> None:
        if self._process is not None:
            await asyncio.sleep(world().bus.draw.random() * 2e-3)
            self._process.at_death.append(self._die)
        await self._server.begin(self)

    async def _execute(self, trip: Callable[[], Any]) -> Any:
        self.check()
        return trip()

    async def commit(self) -> None:
        """Commit the transaction. Most faults happen here: see `Mishaps.at_commit`."""
        self.check()
        if self._process is None or self._server.holder is not self:
            self._server.commit(self)
            return
        await asyncio.sleep(world().bus.draw.random() * world().mishaps.commit_s)
        self.check()
        mishap = world().mishaps.at_commit(self._process) if self._server.changed else None
        if mishap == "refused":
            self._server.release(self)
        elif mishap == "die_before":
            self._process.die()
            raise Killed(self._process.name)
        else:
            self._server.commit(self)
        self._forget()
        if mishap == "die_after":
            self._process.die()
            raise Killed(self._process.name)
        if mishap in ("refused", "unanswered"):
            raise sqlite3.OperationalError(f"the connection was lost: {mishap}")

    async def rollback(self) -> None:
        self._server.release(self)
        self._forget()

    async def close(self) -> None:
        await self.rollback()

    def stop(self) -> None:
        self._server.release(self)

    async def create_function(self, *_: Any, **__: Any) -> None:
        """Ignore the function that SQLAlchemy registers for regular expressions, which no service uses."""

    def _die(self) -> None:
        self._server.release(self)

    def _forget(self) -> None:
        if self._process is not None and self._die in self._process.at_death:
            self._process.at_death.remove(self._die)


class SharedDatabase(Database):
    """`Database` that several processes share, as on several machines; the server isolates their transactions."""

    @property
    def sqlite(self) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing, because the engine serves every process of every run."""


def open_database(service: str) -> Database:
    return SharedDatabase(_engine(service), None)


@cache
def _engine(service: str) -> AsyncEngine:
    """Return the engine of a service. All runs share it, so that statements are compiled once."""

    async def connect(*_: Any, **__: Any) -> Any:
        return Session(_template if (process := CURRENT.get()) is None else world().databases[service], process)

    engine = create_async_engine(
        f"sqlite+aiosqlite:///{service}", module=Driver(), async_creator=connect, poolclass=NullPool
    )

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        await_only(connection.connection.driver_connection.begin())

    return engine


_template: Any = SimpleNamespace()
_pictures: dict[str, bytes] = {}


async def picture_of(service: str, package: str) -> bytes:
    """Return the image of a service's empty database. The migrations create it once per real process."""
    global _template
    if service not in _pictures:
        _template = server = Server()
        await real_upgrade(open_database(service), package)
        _pictures[service] = server.connection.serialize()
    return _pictures[service]


real_upgrade = database.migrate
