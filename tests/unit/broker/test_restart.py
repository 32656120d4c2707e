"""Tests of the broker's state after a restart and after a full disk."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from headrace_broker.batch import parse_produced
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.fetch import InitProducerIdRequest, InitProducerIdResponse
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
    ListGroupsRequest,
    ListGroupsResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)
from headrace_broker.protocol.topics import ConfigResource, DescribeConfigsRequest, DescribeConfigsResponse
from headrace_broker.store import Store
from headrace_broker.topics import CommittedOffsets
from headrace_runtime.errors import SettingError
from tests.support.wire_client import WireClient, batch
from tests.unit.broker.conftest import Live, Run


async def _member(client: WireClient, group: str) -> str:
    """Join `group` as its only member, sync, and return the member id."""
    request = JoinGroupRequest(group, 10_000, 10_000, "", None, "consumer", (Protocol("range", b""),))
    member = (await client.ask(request, JoinGroupResponse)).member_id
    await client.ask(request._replace(member_id=member), JoinGroupResponse)
    sync = SyncGroupRequest(group, 1, member, None, (Assignment(member, b"mine"),))
    assert (await client.ask(sync, SyncGroupResponse)).assignment == b"mine"
    return member


async def _heartbeat(client: WireClient, group: str, member: str) -> int:
    return (await client.ask(HeartbeatRequest(group, 1, member), HeartbeatResponse)).error_code


async def _commit(client: WireClient, group: str, topic: str, offset: int, **member: object) -> int:
    topics = (CommitTopic(topic, (CommitPartition(0, offset, "note"),)),)
    request = OffsetCommitRequest(group, -1, "", -1, topics)._replace(**member)  # type: ignore[arg-type]
    return (await client.ask(request, OffsetCommitResponse)).topics[0].partitions[0].error_code


async def _committed(client: WireClient, group: str) -> list[tuple[str, int, int]]:
    response = await client.ask(OffsetFetchRequest(group, None), OffsetFetchResponse)
    return [(topic.name, p.partition, p.offset) for topic in response.topics for p in topic.partitions]


async def test_everything_is_there_after_a_restart(run: Run) -> None:
    async with run() as live:
        await live.create("t", 2, cleanup_policy="compact", retention_ms=-1)
        cluster = live.broker.cluster_id
        async with live.client() as client:
            first = await client.ask(InitProducerIdRequest(None, 0), InitProducerIdResponse)
            once = batch(producer_id=first.producer_id, epoch=0, sequence=0)
            assert await client.produce("t", once) == (Code.NONE, 0)
            member = await _member(client, "g")
            assert await _commit(client, "g", "t", 1, member_id=member, generation_id=1) == Code.NONE
    async with run() as live, live.client() as client:
        assert live.broker.cluster_id == cluster
        assert await client.produce("t", once) == (Code.NONE, 0), "a retry over the restart"
        assert await client.produce("t", batch()) == (Code.NONE, 1)
        assert await _heartbeat(client, "g", member) == Code.NONE, "no rebalance"
        assert await _committed(client, "g") == [("t", 0, 1)]
        second = await client.ask(InitProducerIdRequest(None, 0), InitProducerIdResponse)
        assert second.producer_id > first.producer_id
        resources = (ConfigResource(2, "t", None),)
        described = await client.ask(DescribeConfigsRequest(resources, False), DescribeConfigsResponse)
        values = {entry.name: entry.value for entry in described.results[0].configs}
        assert (values["cleanup.policy"], values["retention.ms"]) == ("compact", "-1")
        assert len(live.broker.catalog.topics["t"].partitions) == 2


async def test_a_group_that_was_left_is_empty_after_a_restart(run: Run) -> None:
    async with run() as live, live.client() as client:
        member = await _member(client, "g")
        await client.ask(LeaveGroupRequest("g", member), LeaveGroupResponse)
    async with run() as live, live.client() as client:
        groups = await client.ask(ListGroupsRequest(), ListGroupsResponse)
        assert [group.group_id for group in groups.groups] == ["g"]
        assert await _heartbeat(client, "g", member) == Code.UNKNOWN_MEMBER_ID
        assert (
            await client.ask(LeaveGroupRequest("g", member), LeaveGroupResponse)
        ).error_code == Code.UNKNOWN_MEMBER_ID


async def test_groups_without_use_are_forgotten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.coordinator.GROUP_RETENTION_S", 0.05)
    async with run() as live, live.client() as client:
        await live.create("t")
        member = await _member(client, "with a member")
        await _commit(client, "old", "t", 1)
        await asyncio.sleep(0.1)
        await _commit(client, "new", "t", 1)
        await live.broker.coordinator.expire()
        assert {group.id for group in live.broker.coordinator.all()} == {"with a member", "new"}
        assert await _committed(client, "old") == []
        assert await _committed(client, "new") == [("t", 0, 1)]
        assert await _heartbeat(client, "with a member", member) == Code.NONE


def _healthy(live: Live) -> bool:
    return live.broker.writer.trouble is None


async def _fill(client: WireClient, topic: str) -> int:
    """Produce until the disk is full, and return the number of acknowledged batches."""
    for number in range(1_000):
        code, _ = await client.produce(topic, batch([(None, bytes(100_000))]))
        if code != Code.NONE:
            assert code == Code.STORAGE_ERROR
            return number
    raise AssertionError("the disk did not become full")


async def test_a_full_disk_refuses_and_keeps(run: Run) -> None:
    async with run(file_bytes_max=3_000_000) as live, live.client() as client:
        await live.create("t")
        await live.create("other")
        stored = await _fill(client, "t")
        assert stored > 10
        assert not _healthy(live)
        assert await client.base_offsets("t") != []
        records = [await client.fetch("t", offset) for offset in range(stored)]
        assert [code for code, _ in records] == [Code.NONE] * stored
        assert live.broker.catalog.topics["t"].partitions[0].end == stored
        assert await client.produce("other", batch()) == (Code.NONE, 0), "what still fits is taken"
        assert _healthy(live)
    async with run() as live, live.client() as client:
        assert live.broker.catalog.topics["t"].partitions[0].end == stored
        assert await client.produce("t", batch()) == (Code.NONE, stored)


async def test_a_commit_that_fails_leaves_nothing_in_memory(live: Live) -> None:
    """The writer's memory caches the file, so a failed commit reloads it."""
    await live.create("t")
    log, view = live.broker.log, live.broker.view("t", 0)
    once = parse_produced(batch(producer_id=7, epoch=0, sequence=0))

    def refused() -> None:
        log.append(view.id, once, 0)
        live.broker.transactions.begin_session("tx", 1_000, 0)
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(Rejected):
        await live.broker.writer.submit(refused)
    assert log.partition(view.id).end == 0
    assert log.producer(view.id, 7) is None
    assert live.broker.transactions.all() == []
    async with live.client() as client:
        raw = batch(producer_id=7, epoch=0, sequence=0)
        assert [await client.produce("t", raw) for _ in range(2)] == [(Code.NONE, 0)] * 2
        assert await client.base_offsets("t") == [0]


async def test_a_group_on_a_full_disk_is_told_to_come_again(run: Run) -> None:
    async with run(file_bytes_max=1_000_000) as live, live.client() as client:
        await live.create("t")
        await _fill(client, "t")
        code = Code.NONE
        for number in range(400):
            topics = (CommitTopic("t", (CommitPartition(0, 1, "x" * 4_000),)),)
            response = await client.ask(OffsetCommitRequest(f"g{number}", -1, "", -1, topics), OffsetCommitResponse)
            code = Code(response.topics[0].partitions[0].error_code)
            if code is not Code.NONE:
                break
        assert code is Code.COORDINATOR_NOT_AVAILABLE


async def test_a_second_broker_on_the_same_file(live: Live, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="another broker has opened this file"):
        Store(tmp_path)


async def test_a_file_of_another_format(tmp_path: Path) -> None:
    store = Store(tmp_path)
    db = store.connect()
    db.execute("PRAGMA user_version = 99")
    db.close()
    store.close()
    for _ in range(2):  # the lock is given back too
        with pytest.raises(SettingError, match="format 99"):
            Store(tmp_path)


async def test_a_file_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "broker.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(SettingError, match="replace it by a backup"):
        Store(tmp_path)


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot be used"):
        Store(tmp_path / "file" / "broker")


async def test_a_group_that_cannot_be_deleted_stays(run: Run) -> None:
    async with run(file_bytes_max=1_000_000) as live, live.client() as client:
        await live.create("t")
        await _commit(client, "g", "t", 1)
        coordinator = live.broker.coordinator

        def full(_group: str) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CommittedOffsets, "delete_group", lambda _self, group: full(group))
            with pytest.raises(Rejected) as caught:
                await coordinator.delete("g")
        assert caught.value.code is Code.COORDINATOR_NOT_AVAILABLE
        assert coordinator.find("g") is not None
        await coordinator.delete("g")
        assert coordinator.find("g") is None


async def test_a_refused_join_leaves_no_group_behind(live: Live) -> None:
    async with live.client() as client:
        request = JoinGroupRequest("g", 10_000, 10_000, "", None, "consumer", ())
        assert (await client.ask(request, JoinGroupResponse)).error_code == Code.INCONSISTENT_GROUP_PROTOCOL
    assert live.broker.coordinator.all() == []


async def test_a_port_that_is_taken(live: Live, tmp_path: Path) -> None:
    from headrace_broker.app import serve_broker
    from headrace_broker.settings import BrokerSettings
    from headrace_runtime.clock import SystemClock

    store = Store(tmp_path / "other")
    settings = BrokerSettings(kafka_port=live.broker.port)
    with pytest.raises(SettingError, match="kafka_port"):
        async with serve_broker(store, settings, SystemClock()):
            pass
    store.close()
