"""Tests of requests that no client library would send: the embedded broker and Kafka return equal error codes."""

from __future__ import annotations

import struct

import pytest

from headrace_broker.errors import Code
from headrace_broker.protocol.fetch import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from headrace_broker.protocol.groups import (
    Assignment,
    CommitPartition,
    CommitTopic,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)
from headrace_broker.protocol.metadata import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from headrace_broker.protocol.transactions import (
    AddedTopic,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
)
from tests.contract.bus.conftest import CreateTopic
from tests.support.wire_client import WireClient, batch, connected, corrupted, now_ms, patched

DAY_MS = 86_400_000


async def _producer_id(client: WireClient) -> int:
    return (await client.ask_ready(InitProducerIdRequest(None, 60_000), InitProducerIdResponse)).producer_id


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (batch(), Code.NONE),
        (corrupted(batch()), Code.CORRUPT_MESSAGE),
        (batch()[:40], Code.INVALID_RECORD),
        (b"", Code.INVALID_RECORD),
        (patched(batch(), length=1_000), Code.INVALID_RECORD),
        (batch() + batch(), Code.INVALID_RECORD),
        (batch([(None, bytes(1_100_000))]), Code.MESSAGE_TOO_LARGE),
        (batch(timestamps=[now_ms() + DAY_MS]), Code.INVALID_TIMESTAMP),
        (patched(batch(), count=2), Code.INVALID_RECORD),
        (patched(batch(), attributes=0x20), Code.INVALID_RECORD),
    ],
    ids=["good", "checksum", "cut", "empty", "length", "two batches", "large", "tomorrow", "count", "control"],
)
async def test_batches(bus: str, topic: str, records: bytes, code: Code) -> None:
    async with connected(bus) as client:
        assert (await client.produce(topic, records))[0] == code
        assert (await client.produce(topic, batch()))[0] == Code.NONE
        assert len(await client.base_offsets(topic)) == (2 if code is Code.NONE else 1)


async def test_acks_and_places(bus: str, topic: str, unique: str) -> None:
    async with connected(bus) as client:
        assert (await client.produce(topic, batch(), acks=2))[0] == Code.INVALID_REQUIRED_ACKS
        assert (await client.produce(topic, batch(), acks=1))[0] == Code.NONE
        assert (await client.produce(topic, batch(), partition=1))[0] == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.produce(unique, batch()))[0] == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.fetch(topic, partition=7))[0] == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.fetch(topic, offset=99))[0] == Code.OFFSET_OUT_OF_RANGE


@pytest.mark.parametrize("compression", [0, 1])
async def test_keyless_records_in_a_compacted_topic(bus: str, create: CreateTopic, compression: int) -> None:
    topic = await create(cleanup_policy="compact")
    async with connected(bus) as client:
        records = batch([(b"k", b"v"), (None, b"v")], compression=compression)
        assert (await client.produce(topic, records))[0] == Code.INVALID_RECORD
        assert (await client.produce(topic, batch(compression=compression)))[0] == Code.NONE


async def test_sequences_of_an_idempotent_producer(bus: str, topic: str) -> None:
    async with connected(bus) as client:
        producer = await _producer_id(client)

        async def send(sequence: int, epoch: int = 0, count: int = 1) -> tuple[int, int]:
            records = batch([(None, b"x")] * count, producer_id=producer, epoch=epoch, sequence=sequence)
            return await client.produce(topic, records)

        assert await send(0) == (Code.NONE, 0)
        assert await send(1, count=3) == (Code.NONE, 1)
        assert await send(4) == (Code.NONE, 4)
        assert await send(1, count=3) == (Code.NONE, 1), "a retry is told where it is stored"
        assert await send(0) == (Code.NONE, 0)
        assert (await send(7))[0] == Code.OUT_OF_ORDER_SEQUENCE
        assert (await send(5, epoch=1))[0] == Code.OUT_OF_ORDER_SEQUENCE, "a new epoch starts at 0"
        assert await send(0, epoch=1) == (Code.NONE, 5)
        assert (await send(5, epoch=0))[0] == Code.INVALID_PRODUCER_EPOCH
        for number in range(1, 6):
            assert await send(number, epoch=1) == (Code.NONE, 5 + number)
        assert (await send(0, epoch=1))[0] != Code.NONE, "only five batches are remembered"
        assert await client.base_offsets(topic) == [0, 1, 4, 5, 6, 7, 8, 9, 10]


async def test_list_offsets(bus: str, topic: str) -> None:
    async with connected(bus) as client:
        await client.produce(topic, batch([(None, b"x")] * 3, timestamps=[1000, 3000, 2000]))

        async def at(timestamp: int) -> tuple[int, int, int]:
            topics = (ListOffsetsTopic(topic, (ListOffsetsPartition(0, timestamp),)),)
            response = await client.ask(ListOffsetsRequest(-1, 0, topics), ListOffsetsResponse)
            answer = response.topics[0].partitions[0]
            return answer.error_code, answer.offset, answer.timestamp

        assert await at(-1) == (0, 3, -1)
        assert await at(-2) == (0, 0, -1)
        assert await at(1500) == (0, 1, 3000)
        assert await at(1000) == (0, 0, 1000)
        assert await at(3001) == (0, -1, -1)


async def test_metadata_and_coordinator(bus: str, topic: str, unique: str) -> None:
    host, port = bus.split(":")
    async with connected(bus) as client:
        response = await client.ask(MetadataRequest((topic, unique), True), MetadataResponse)
        assert {entry.name: entry.error_code for entry in response.topics} == {topic: 0, unique: 3}
        (broker,) = response.brokers
        assert (broker.host, broker.port) == (host, int(port))
        assert response.topics[0].partitions[0].leader_id == broker.node_id == response.controller_id
        assert (await client.ask(MetadataRequest((), False), MetadataResponse)).topics == ()
        everything = await client.ask(MetadataRequest(None, False), MetadataResponse)
        assert topic in {entry.name for entry in everything.topics}
        coordinator = await client.ask_ready(FindCoordinatorRequest(unique, 0), FindCoordinatorResponse)
        assert (coordinator.error_code, coordinator.node_id, coordinator.host, coordinator.port) == (
            0,
            broker.node_id,
            host,
            int(port),
        )


def _join(group: str, member: str = "") -> JoinGroupRequest:
    return JoinGroupRequest(group, 10_000, 10_000, member, None, "consumer", (Protocol("range", b"meta"),))


async def test_members_that_are_not(bus: str, topic: str, unique: str) -> None:
    async with connected(bus) as client:
        await client.ask_ready(FindCoordinatorRequest(unique, 0), FindCoordinatorResponse)
        topics = (CommitTopic(topic, (CommitPartition(0, 1, ""),)),)

        async def join(request: JoinGroupRequest) -> JoinGroupResponse:
            return await client.ask_ready(request, JoinGroupResponse)

        assert (await join(_join(unique)._replace(session_timeout_ms=10))).error_code == Code.INVALID_SESSION_TIMEOUT
        assert (await join(_join(""))).error_code == Code.INVALID_GROUP_ID
        assert (await join(_join(unique, "nobody"))).error_code == Code.UNKNOWN_MEMBER_ID
        first = await join(_join(unique))
        assert first.error_code == Code.MEMBER_ID_REQUIRED
        member = first.member_id
        joined = await join(_join(unique, member))
        assert (joined.error_code, joined.generation_id, joined.leader, joined.protocol_name) == (0, 1, member, "range")
        assert [(m.member_id, m.metadata) for m in joined.members] == [(member, b"meta")]

        async def heartbeat(member_id: str, generation: int) -> int:
            return (await client.ask(HeartbeatRequest(unique, generation, member_id), HeartbeatResponse)).error_code

        synced = await client.ask(
            SyncGroupRequest(unique, 1, member, None, (Assignment(member, b"mine"),)), SyncGroupResponse
        )
        assert (synced.error_code, synced.assignment) == (0, b"mine")
        again = await client.ask(SyncGroupRequest(unique, 1, member, None, ()), SyncGroupResponse)
        assert (again.error_code, again.assignment) == (0, b"mine")
        assert await heartbeat(member, 1) == Code.NONE
        assert await heartbeat(member, 7) == Code.ILLEGAL_GENERATION
        assert await heartbeat("nobody", 1) == Code.UNKNOWN_MEMBER_ID
        late = await client.ask(SyncGroupRequest(unique, 3, member, None, ()), SyncGroupResponse)
        assert late.error_code == Code.ILLEGAL_GENERATION
        other = _join(unique)._replace(protocols=(Protocol("sticky", b""),))
        assert (await join(other)).error_code == Code.INCONSISTENT_GROUP_PROTOCOL

        async def commit(member_id: str, generation: int) -> int:
            request = OffsetCommitRequest(unique, generation, member_id, -1, topics)
            response = await client.ask(request, OffsetCommitResponse)
            return response.topics[0].partitions[0].error_code

        assert await commit(member, 9) == Code.ILLEGAL_GENERATION
        assert await commit("nobody", 1) == Code.UNKNOWN_MEMBER_ID
        assert await commit("", -1) == Code.UNKNOWN_MEMBER_ID
        assert await commit(member, 1) == Code.NONE
        left = await client.ask(LeaveGroupRequest(unique, member), LeaveGroupResponse)
        assert left.error_code == Code.NONE
        assert await commit("", -1) == Code.NONE, "without members anybody may commit"


async def test_offsets_of_unknown_partitions_and_long_metadata(bus: str, topic: str, unique: str) -> None:
    async with connected(bus) as client:
        partitions = (CommitPartition(0, 5, "ok"), CommitPartition(3, 5, ""))
        topics = (CommitTopic(topic, partitions), CommitTopic(unique, (CommitPartition(0, 1, ""),)))
        await client.ask_ready(FindCoordinatorRequest(unique, 0), FindCoordinatorResponse)
        await client.ask_ready(_join(unique, "nobody"), JoinGroupResponse)  # until the group is loaded
        response = await client.ask(OffsetCommitRequest(unique, -1, "", -1, topics), OffsetCommitResponse)
        codes = {(t.name, p.partition): p.error_code for t in response.topics for p in t.partitions}
        assert codes == {(topic, 0): 0, (topic, 3): 3, (unique, 0): 3}
        long = (CommitTopic(topic, (CommitPartition(0, 9, "x" * 5_000),)),)
        response = await client.ask(OffsetCommitRequest(unique, -1, "", -1, long), OffsetCommitResponse)
        assert response.topics[0].partitions[0].error_code == Code.OFFSET_METADATA_TOO_LARGE
        fetched = await client.ask(OffsetFetchRequest(unique, None), OffsetFetchResponse)
        ((name, (entry,)),) = fetched.topics
        assert (name, entry.partition, entry.offset, entry.metadata) == (topic, 0, 5, "ok")


async def test_transactions_that_are_not(bus: str, topic: str, unique: str) -> None:
    async with connected(bus) as client:
        await client.ask_ready(FindCoordinatorRequest(unique, 1), FindCoordinatorResponse)

        async def begin(name: str, timeout_ms: int = 10_000) -> InitProducerIdResponse:
            return await client.ask_ready(InitProducerIdRequest(name, timeout_ms), InitProducerIdResponse)

        assert (await begin(unique, 10**9)).error_code == Code.INVALID_TRANSACTION_TIMEOUT
        assert (await begin("")).error_code == Code.INVALID_REQUEST
        first = await begin(unique)
        second = await begin(unique)
        assert second.producer_id == first.producer_id
        assert (first.producer_epoch, second.producer_epoch) == (0, 1)

        async def add(producer: int, epoch: int, *partitions: int) -> dict[int, int]:
            request = AddPartitionsToTxnRequest(unique, producer, epoch, (AddedTopic(topic, partitions),))
            response = await client.ask(request, AddPartitionsToTxnResponse)
            return {p.partition: p.error_code for p in response.topics[0].partitions}

        async def end(producer: int, epoch: int) -> int:
            return (await client.ask(EndTxnRequest(unique, producer, epoch, True), EndTxnResponse)).error_code

        producer = second.producer_id
        assert await add(producer, 0, 0) == {0: Code.INVALID_PRODUCER_EPOCH}
        assert await add(producer + 999, 1, 0) == {0: Code.INVALID_PRODUCER_ID_MAPPING}
        assert await add(producer, 1, 0, 5) == {
            0: Code.OPERATION_NOT_ATTEMPTED,
            5: Code.UNKNOWN_TOPIC_OR_PARTITION,
        }
        assert await end(producer, 1) == Code.INVALID_TXN_STATE
        records = batch(producer_id=producer, epoch=1, sequence=0, transactional=True)
        assert (await client.produce(topic, records, transactional_id=unique))[0] == Code.INVALID_TXN_STATE
        assert await add(producer, 1, 0) == {0: Code.NONE}
        assert (await client.produce(topic, records, transactional_id=unique))[0] == Code.NONE
        assert await end(producer, 0) == Code.INVALID_PRODUCER_EPOCH
        assert await end(producer, 1) == Code.NONE


async def test_answers_keep_the_order_of_requests(bus: str, topic: str, unique: str) -> None:
    async with connected(bus) as client:
        for name in (topic, unique, topic, unique):
            client.send(MetadataRequest((name,), False))
        names = [(await client.receive(MetadataResponse)).topics[0].name for _ in range(4)]
        assert names == [topic, unique, topic, unique]


@pytest.mark.parametrize("frame", [struct.pack(">hhi", 999, 0, 1), struct.pack(">hhi", 3, 99, 1), b"\0\0\0"])
async def test_what_is_not_served_ends_the_connection(bus: str, topic: str, frame: bytes) -> None:
    """The broker closes the connection after a readable answer, so that the client does not hang."""
    async with connected(bus) as client:
        client.send_raw(frame)
        with pytest.raises((EOFError, OSError)):
            await client.receive_raw()
    async with connected(bus) as client:
        assert (await client.produce(topic, batch()))[0] == Code.NONE


async def test_versions_of_a_newer_client(bus: str) -> None:
    """ApiVersions in an unknown version is answered in the oldest format, with error 35."""
    async with connected(bus) as client:
        client.send_raw(struct.pack(">hhih", 18, 99, 7, -1) + b"\0")
        body = await client.receive_raw()
        correlation, code, count = struct.unpack_from(">ihi", body)
        assert (correlation, code) == (7, Code.UNSUPPORTED_VERSION)
        assert count >= 1
