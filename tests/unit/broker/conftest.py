"""Fixtures for the broker: a live broker in the event loop of the test, its log without threads or sockets, and a
consumer group with a clock that the test controls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from headrace_broker import cleanup, reads
from headrace_broker.app import serve_broker
from headrace_broker.batch import RecordBatch, parse, parse_produced, records
from headrace_broker.broker import Broker, Credentials
from headrace_broker.cleanup import Upkeep
from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, GroupMember, Phase
from headrace_broker.log import AppendResult, Log
from headrace_broker.protocol.groups import (
    Assignment,
    JoinGroupRequest,
    JoinGroupResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)
from headrace_broker.protocol.topics import ConfigEntry, CreateTopicsRequest, CreateTopicsResponse, NewTopic
from headrace_broker.reads import ReadRequest, ReadResult
from headrace_broker.server import Server
from headrace_broker.settings import BrokerSettings
from headrace_broker.store import Store
from headrace_broker.topic_config import TopicConfig
from headrace_broker.topics import CommittedOffsets, TopicStore
from headrace_broker.transactions import Transactions
from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.disk import DiskGuard
from tests.support.wire_client import Entry, WireClient, batch, connected

T = TypeVar("T")
ALL = 1 << 40


class Row(NamedTuple):
    """A record as a consumer sees it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


class Harness:
    """The broker's log in a file, without a server. `run` commits an operation; `fail` rolls it back like a failed
    disk write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder, fsync=False)
        self.db = self.store.connect()
        self.reader = self.store.connect()
        self.log = Log(self.db)
        self.offsets = CommittedOffsets(self.db)
        self.topics = TopicStore(self.db, self.log, partitions_max=100)
        self.transactions = Transactions(self.db, self.log, self.offsets)
        self.upkeep = Upkeep(self.db, self.log)

    def close(self) -> None:
        self.db.close()
        self.reader.close()
        self.store.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def run(self, operation: Callable[[], T]) -> T:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            result = operation()
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self._flush()
        self.db.execute("COMMIT")
        return result

    def fail(self, operation: Callable[[], object]) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        operation()
        self._flush()
        self.db.execute("ROLLBACK")
        for state in (self.topics, self.log, self.transactions):
            state.reload()

    def _flush(self) -> None:
        for state in (self.topics, self.log, self.transactions):
            state.flush()

    def topic(self, name: str = "t", partitions: int = 1, config: TopicConfig | None = None) -> list[int]:
        """Create a topic and return the ids of its partitions."""
        chosen = config or TopicConfig()
        self.run(lambda: self.topics.create(name, partitions, chosen, validate_only=False))
        return [p.id for p in self.log.partitions() if p.topic == name]

    def append(self, partition_id: int, raw: bytes, now_ms: int = 0) -> AppendResult:
        return self.run(lambda: self.log.append(partition_id, parse_produced(raw), now_ms))

    def put(self, partition_id: int, *entries: Entry, **options: object) -> AppendResult:
        return self.append(partition_id, batch(entries, **options))  # type: ignore[arg-type]

    def put_once(self, partition_id: int, producer: int, sequence: int = 0, now_ms: int = 0) -> int:
        """Append a batch of an idempotent producer, and return its base offset."""
        return self.append(partition_id, batch(producer_id=producer, epoch=0, sequence=sequence), now_ms).base_offset

    def fetch(self, partition_id: int, offset: int = 0, *, committed: bool = False, bytes_max: int = ALL) -> ReadResult:
        partition = self.log.partition(partition_id)
        before = partition.stable if committed else partition.end
        return reads.read_batches(
            self.reader, [ReadRequest(partition_id, offset, before, bytes_max, committed)], bytes_max
        )[0]

    def rows(self, partition_id: int, offset: int = 0, *, committed: bool = False) -> list[Row]:
        """Return the records from `offset` on as a Kafka client decodes them."""
        got = self.fetch(partition_id, offset, committed=committed)
        return [row for row in client_view(got, committed=committed) if row.offset >= offset]

    def compact(
        self, partition_id: int, *, tombstones_before_ms: int = -1, keys_max: int = 10**6
    ) -> cleanup.CompactionPass:
        """Run one complete compaction pass over the partition."""
        partition = self.log.partition(partition_id)
        last = cleanup.last_batch(self.reader, partition_id)
        work = cleanup.CompactionPass(
            partition_id=partition_id,
            start=partition.start,
            limit=min(partition.stable, partition.end if last is None else last),
            at=max(cleanup.progress(self.reader, partition_id)[0], partition.start),
            tombstones_before_ms=tombstones_before_ms,
            keys_max=keys_max,
        )
        cleanup.begin(self.reader, work)
        while cleanup.index(self.reader, work):
            pass
        work.at = work.start
        while (changes := cleanup.rewrite(self.reader, work)) is not None:
            self.run(lambda changes=changes: self.upkeep.replace(partition_id, changes))  # type: ignore[misc]
        self.run(lambda: self.upkeep.record_pass(partition_id, work.limit, work.kept_bytes))
        return work


def split(data: bytes) -> list[RecordBatch]:
    """Split the bytes of a Fetch response into record batches."""
    batches = []
    while data:
        size = 12 + int.from_bytes(data[8:12], "big")
        batches.append(parse(data[:size]))
        data = data[size:]
    return batches


def client_view(got: ReadResult, *, committed: bool) -> list[Row]:
    """Return the records that a Kafka client would deliver: without control records and aborted transactions."""
    from aiokafka.record.default_records import DefaultRecordBatch

    pending = sorted(got.aborted or (), key=lambda entry: entry.first_offset, reverse=True)
    skipped: set[int] = set()
    rows: list[Row] = []
    for record_batch in split(got.records):
        while pending and pending[-1].first_offset <= record_batch.base_offset:
            skipped.add(pending.pop().producer_id)
        if record_batch.control:
            (record,) = records(record_batch)
            if record.key is not None and bytes(record.key)[2:] == b"\0\0":
                skipped.discard(record_batch.producer_id)
            continue
        if committed and record_batch.transactional and record_batch.producer_id in skipped:
            continue
        entries: Sequence[object] = list(DefaultRecordBatch(bytearray(record_batch.raw)))
        rows += [Row(e.offset, e.timestamp, e.key, e.value) for e in entries]  # type: ignore[attr-defined]
    return rows


RANGE = (Protocol("range", b"r"),)
BOTH = (Protocol("sticky", b"s"), Protocol("range", b"r"))


class Clients:
    """Members of one consumer group, with the latest JoinGroup and SyncGroup response of each member."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.now = 0.0
        self.ids = 0
        self.joined: dict[str, JoinGroupResponse] = {}
        self.synced: dict[str, SyncGroupResponse] = {}

    def join(
        self, member_id: str = "", *, protocols: tuple[Protocol, ...] = RANGE, instance: str | None = None,
        session_s: float = 10, rebalance_s: float = 20,
    ) -> str:  # fmt: skip
        """Send a JoinGroup request, again with the assigned id if the member is new, and return the member id.

        The response is stored in `joined` once the group sends it.
        """
        request = JoinGroupRequest(
            "g", int(session_s * 1000), int(rebalance_s * 1000), member_id, instance, "consumer", protocols
        )
        self.ids += 1
        member = GroupMember(
            member_id or f"m{self.ids}",
            instance,
            "client",
            "/host",
            session_s,
            rebalance_s,
            protocols,
            self.now + session_s,
        )
        try:
            self.group.join(request, member, partial(self.joined.__setitem__, member.id), self.now)
        except Rejected as error:
            if error.code is not Code.MEMBER_ID_REQUIRED:
                raise
            return self.join(member.id, protocols=protocols, session_s=session_s, rebalance_s=rebalance_s)
        return member.id

    def sync(self, member_id: str, assignments: dict[str, bytes] | None = None) -> None:
        assigned = tuple(Assignment(*item) for item in (assignments or {}).items())
        request = SyncGroupRequest("g", self.joined[member_id].generation_id, member_id, None, assigned)
        self.group.sync(request, partial(self.synced.__setitem__, member_id), self.now)

    def heartbeat(self, member_id: str) -> Code:
        try:
            self.group.heartbeat(member_id, self.joined[member_id].generation_id, self.now)
        except Rejected as error:
            return error.code
        return Code.NONE

    def settle(self, *members: str) -> None:
        """Let all `members` rejoin and sync. The leader assigns to each member its own id."""
        for member in members:
            self.join(member)
        leader = self.joined[members[0]].leader
        for member in members:
            self.sync(member, {m: m.encode() for m in members} if member == leader else None)

    def phase(self) -> Phase:
        return self.group.phase

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.group.tick(self.now)


class Live(NamedTuple):
    broker: Broker
    server: Server
    store: Store

    def client(self) -> AbstractAsyncContextManager[WireClient]:
        return connected(f"127.0.0.1:{self.broker.port}")

    async def create(self, name: str, partitions: int = 1, **config: object) -> str:
        """Create a topic and return its name. Underscores in the names of topic settings stand for dots."""
        entries = tuple(ConfigEntry(key.replace("_", "."), str(value)) for key, value in config.items())
        async with self.client() as client:
            topics = (NewTopic(name, partitions, 1, (), entries),)
            response = await client.ask(CreateTopicsRequest(topics, 1_000, False), CreateTopicsResponse)
        assert [topic.error_code for topic in response.topics] == [0], response
        return name


Run = Callable[..., AbstractAsyncContextManager[Live]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that starts a broker on the file of this test, without fsync. A second call restarts the
    broker."""

    @contextlib.asynccontextmanager
    async def start(
        guards: tuple[DiskGuard | None, DiskGuard | None] = (None, None),
        password: str = "",
        **changes: object,
    ) -> AsyncIterator[Live]:
        settings = BrokerSettings.model_validate({"kafka_port": 0, "port": 0, "fsync": False, **changes})
        store = Store(tmp_path, fsync=settings.fsync, file_bytes_max=settings.file_bytes_max)
        try:
            login = Credentials("headrace", password)
            async with serve_broker(store, settings, SystemClock(), login, guards) as (broker, server):
                yield Live(broker, server, store)
        finally:
            store.close()

    return start


@pytest.fixture
async def live(run: Run) -> AsyncIterator[Live]:
    """Yield a running broker with default settings."""
    async with run() as running:
        yield running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Harness]:
    """Yield the writer and the reader of the broker's file, without a server."""
    harness = Harness(tmp_path)
    yield harness
    harness.close()


@pytest.fixture
def clients() -> Clients:
    """Return the members of an empty consumer group in memory."""
    return Clients(Group("g"))
