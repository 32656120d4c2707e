"""Tests of the copy of a bus to another one: each record keeps its offset, and tables and positions are copied.

The copy is also killed, repeated and refused.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import TopicAuthorizationFailedError

from headrace.errors import UsageError
from headrace_operations.mirror import MirrorResult, mirror
from headrace_operations.mirror.logs import PADDING
from headrace_operations.mirror.side import MirrorConflict
from tests.integration.conftest import on_each_bus, wipe
from tests.support import wire_client
from tests.support.presence import draw_seed
from tests.support.servers import BrokerProcess
from tests.support.wire_client import administering, consuming, eventually, producing

NOW_MS = int(time.time() * 1000)
DAY_MS = 86_400_000
LOG = {"retention.ms": str(3 * DAY_MS), "cleanup.policy": "delete"}
TABLE = {"retention.ms": str(DAY_MS), "cleanup.policy": "compact"}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the addresses of two embedded brokers with the topics of one test, because a mirror refuses topics in
    use."""
    processes = [
        BrokerProcess(tmp_path_factory.mktemp(name), BROKER__MAINTENANCE_INTERVAL_S=0.2)
        for name in ("source", "target")
    ]
    for process in processes:
        process.start()
    yield processes[0].address, processes[1].address
    for process in processes:
        process.stop()


@pytest.fixture
async def source(brokers: tuple[str, str]) -> AsyncIterator[str]:
    """Yield the address of an empty bus to copy from."""
    yield brokers[0]
    await wipe(brokers[0])


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def target(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Yield the address of an empty bus of each kind to copy to."""
    embedded = request.param == "embedded"
    address: str = request.getfixturevalue("brokers")[1] if embedded else request.getfixturevalue("own_kafka")
    yield address
    await wipe(address)


async def create(bus: str, name: str, partitions: int, config: dict[str, str]) -> None:
    async with administering(bus) as admin:
        await wire_client.create(admin, name, partitions, config)


async def fill(bus: str, topic: str, count: int, *, partitions: int = 4, at_ms: int = NOW_MS, name: str = "r") -> None:
    async with producing(bus) as producer:
        acks = [
            await producer.send(
                topic, b"" if number % 7 == 0 else b"%d" % number, f"{name}{number}".encode(), number % partitions,
                at_ms + number, [("ce_id", b"%d" % number), ("empty", b"")] if number % 3 else [],
            )
            for number in range(count)
        ]  # fmt: skip
        await asyncio.gather(*acks)


async def transactions(bus: str, topic: str) -> None:
    """Write committed and aborted transactions, so that some offsets in the middle and at the end have no committed
    record."""
    async with producing(bus, transactional_id="t") as producer:
        for number, commit in enumerate([True, False, True, True, False]):
            await producer.begin_transaction()
            for part in range(3):
                await producer.send_and_wait(topic, b"%d-%d" % (number, part), b"k", 0, NOW_MS + number)
            await (producer.commit_transaction() if commit else producer.abort_transaction())


async def records(bus: str, topic: str, partition: int = 0) -> list[ConsumerRecord]:
    topic_partition = TopicPartition(topic, partition)
    async with consuming(bus, isolation_level="read_committed") as reader:
        reader.assign([topic_partition])
        await reader.seek_to_beginning(topic_partition)
        end = (await reader.end_offsets([topic_partition]))[topic_partition]
        messages: list[ConsumerRecord] = []
        while await reader.position(topic_partition) < end:
            messages += (await reader.getmany(topic_partition, timeout_ms=200)).get(topic_partition, [])
        return messages


def facts(messages: list[ConsumerRecord]) -> list[tuple[object, ...]]:
    return [
        (message.offset, message.timestamp, message.key, message.value, tuple(message.headers)) for message in messages
    ]


async def first_offset(bus: str, topic: str) -> int:
    topic_partition = TopicPartition(topic, 0)
    async with consuming(bus) as reader:
        return int((await reader.beginning_offsets([topic_partition]))[topic_partition])


async def commit(bus: str, group: str, positions: dict[tuple[str, int], int]) -> None:
    async with consuming(bus, group_id=group) as reader:
        offsets = {TopicPartition(*key): offset for key, offset in positions.items()}
        reader.assign(list(offsets))
        await reader.commit(offsets)


async def next_of(bus: str, group: str, topic: str) -> ConsumerRecord:
    """Return the next record of the consumer group on partition 0."""
    async with consuming(bus, group_id=group) as reader:
        reader.assign([TopicPartition(topic, 0)])
        return await asyncio.wait_for(reader.getone(), 20)


async def test_logs_keep_their_offsets_and_groups_their_place(source: str, target: str) -> None:
    await create(source, "turns", 4, LOG)
    await create(source, "mine", 2, {**LOG, "max.message.bytes": "2000"})
    await fill(source, "turns", 400)
    await fill(source, "mine", 11, partitions=2)
    await commit(source, "headrace-collector", {("turns", 0): 17, ("turns", 3): 100})
    mirrored = await mirror(source, target)
    assert mirrored.moving == []
    assert [log.records for log in mirrored.checked] == [6, 5, 100, 100, 100, 100]
    for topic, partition in [("turns", 0), ("turns", 1), ("turns", 2), ("turns", 3), ("mine", 0), ("mine", 1)]:
        expected = facts(await records(source, topic, partition))
        assert facts(await records(target, topic, partition)) == expected
    assert (await next_of(target, "headrace-collector", "turns")).key == b"r68"
    again = await mirror(source, target)
    assert again == mirrored, "nothing is written twice"


async def test_ends_of_transactions_become_repetitions_and_aborted_records_stay_away(source: str, target: str) -> None:
    await create(source, "rewards", 1, LOG)
    await transactions(source, "rewards")
    await fill(source, "rewards", 2, partitions=1)
    await transactions(source, "rewards")
    await mirror(source, target)
    source_facts, target_facts = facts(await records(source, "rewards")), facts(await records(target, "rewards"))
    assert {fact[0] for fact in source_facts} < {fact[0] for fact in target_facts}
    repeated = {}
    for fact in target_facts:
        if fact in source_facts:
            repeated = dict(enumerate(fact[1:]))
        assert dict(enumerate(fact[1:])) == repeated, "what was added repeats the committed record before it"
    assert [fact[0] for fact in target_facts] == list(range(len(target_facts)))
    async with consuming(source) as reader:
        topic_partition = TopicPartition("rewards", 0)
        assert len(target_facts) == (await reader.end_offsets([topic_partition]))[topic_partition]
    await create(source, "foreign", 1, LOG)
    await transactions(source, "foreign")
    with pytest.raises(UsageError, match="--without foreign"):
        await mirror(source, target)
    assert (await mirror(source, target, without=["foreign"])).moving == []


async def expire(source: str, count: int) -> int:
    """Write `count` expired records and 30 recent ones, wait for retention, and return the first remaining offset."""
    await create(source, "feedback", 1, LOG)
    await fill(source, "feedback", count, partitions=1, at_ms=NOW_MS - 30 * DAY_MS, name="old")
    await fill(source, "feedback", 30, partitions=1)

    async def expired() -> bool:
        return await first_offset(source, "feedback") == count

    await eventually(expired)
    return count


@pytest.mark.kafka
async def test_a_log_that_does_not_begin_at_0_begins_there_on_kafka_too(source: str, own_kafka: str) -> None:
    await begins_where_the_source_does(source, own_kafka)
    await wipe(own_kafka)


async def test_a_log_that_does_not_begin_at_0_begins_there_on_a_broker_too(
    source: str, brokers: tuple[str, str]
) -> None:
    await begins_where_the_source_does(source, brokers[1])
    await wipe(brokers[1])


async def begins_where_the_source_does(source: str, bus: str) -> None:
    begun = await expire(source, 5_000)
    await create(bus, "feedback", 1, LOG)
    async with producing(bus) as producer:  # as if it had been killed while it padded
        for _ in range(3):
            await producer.send_and_wait("feedback", None, PADDING, 0, 1)
    await commit(source, "headrace-scorer", {("feedback", 0): begun + 3})
    await mirror(source, bus)
    assert await first_offset(bus, "feedback") == begun
    assert facts(await records(bus, "feedback")) == facts(await records(source, "feedback"))
    expected = (await records(source, "feedback"))[3]
    assert (await next_of(bus, "headrace-scorer", "feedback")).value == expected.value
    await fill(source, "feedback", 5, partitions=1, name="later")
    assert (await mirror(source, bus)).moving == []
    assert facts(await records(bus, "feedback")) == facts(await records(source, "feedback"))


async def test_a_bus_that_cannot_begin_a_log_elsewhere_is_refused(
    source: str, brokers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden(*_: object) -> None:
        raise TopicAuthorizationFailedError

    monkeypatch.setattr(AIOKafkaAdminClient, "delete_records", forbidden)
    await expire(source, 100)
    with pytest.raises(UsageError, match="the permission to delete records"):
        await mirror(source, brokers[1])
    await wipe(brokers[1])


async def test_tables_are_copied_as_tables_and_positions_in_them_translated(source: str, target: str) -> None:
    await create(source, "replicas", 1, TABLE)
    async with producing(source) as producer:
        for number in range(60):
            name = b"gone" if number == 20 else b"r%d" % (number % 3)
            value = None if number == 20 else b"%d" % number
            await producer.send_and_wait("replicas", value, name, 0, NOW_MS + number)
    await commit(source, "watcher", {("replicas", 0): 58})
    mirrored = await mirror(source, target)
    assert [entry.records for entry in mirrored.checked] == [3]
    rows = await records(target, "replicas")
    assert {entry.key: entry.value for entry in rows if entry.value} == {b"r0": b"57", b"r1": b"58", b"r2": b"59"}
    assert len(rows) == 4
    assert (await next_of(target, "watcher", "replicas")).value == b"58"
    async with producing(source) as producer:
        await producer.send_and_wait("replicas", b"new", b"r1", 0, NOW_MS + 100)
        await producer.send_and_wait("replicas", None, b"r2", 0, NOW_MS + 101)
    await mirror(source, target)
    table = {entry.key: entry.value for entry in await records(target, "replicas")}
    assert {key: value for key, value in table.items() if value} == {b"r0": b"57", b"r1": b"new"}
    assert len(await records(target, "replicas")) == 6
    async with producing(target) as producer:
        await producer.send_and_wait("replicas", b"newer", b"r1", 0, NOW_MS + 200)
    with pytest.raises(MirrorConflict, match="in use already"):
        await mirror(source, target)


@on_each_bus("target")
@pytest.mark.long
async def test_killed_half_way_and_run_again_nothing_is_there_twice(source: str, target: str) -> None:
    seed = draw_seed()
    choose, count = random.Random(seed), 20_000
    for bus in (source, target):
        await create(bus, "turns", 2, LOG)
    await fill(source, "turns", count, partitions=2)
    kills = 0
    for _ in range(3):
        process = await start_mirror(source, target)
        at = await until_copied(target, choose.randrange(500, count // 3), process)
        kills += process.returncode is None and at < count
        if process.returncode is None:
            process.kill()
        await process.communicate()
    assert kills, "it was always faster"
    process = await start_mirror(source, target)
    printed, _ = await process.communicate()
    report = json.loads(printed)
    assert report["complete"]
    assert [partition["records"] for partition in report["partitions"]] == [count // 2, count // 2]
    for number in range(2):
        assert facts(await records(target, "turns", number)) == facts(await records(source, "turns", number))


async def start_mirror(source: str, target: str) -> asyncio.subprocess.Process:
    script = Path(sys.executable).with_name("headrace")
    return await asyncio.create_subprocess_exec(
        script, "mirror", "--from", source, "--to", target, "--json", stdout=asyncio.subprocess.PIPE
    )


async def until_copied(target: str, more: int, process: asyncio.subprocess.Process) -> int:
    """Wait until `more` records are on the target's topic or the process has ended, and return the number of
    records."""
    partitions = [TopicPartition("turns", number) for number in range(2)]
    async with consuming(target) as reader:
        before = at = int(sum((await reader.end_offsets(partitions)).values()))

        async def enough() -> bool:
            nonlocal at
            at = int(sum((await reader.end_offsets(partitions)).values()))
            return at >= before + more or process.returncode is not None

        await eventually(enough, 60)
    return at


async def test_other_data_on_the_target_is_refused_with_a_remedy(source: str, target: str) -> None:
    await create(source, "turns", 1, LOG)
    await fill(source, "turns", 20, partitions=1)

    async def refused(kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            await mirror(source, target)

    await create(target, "turns", 1, LOG)
    await fill(target, "turns", 5, partitions=1, name="other")
    await refused(MirrorConflict, r"turns\[0\] at 0: .* has other data .* delete the topic on the target")
    await fill(target, "turns", 30, partitions=1, name="more")
    await refused(MirrorConflict, r"ends at 35 .* in use already")
    async with administering(target) as admin:
        await admin.delete_topics(["turns"])

    async def recreated() -> bool:
        async with administering(target) as admin:
            return "turns" not in await admin.list_topics()

    await eventually(recreated)
    await create(target, "turns", 3, LOG)
    await refused(UsageError, r"has 1 partitions here and 3 .*keys would change their partitions")
    with pytest.raises(UsageError, match="is both source and target"):
        await mirror(source, source)


async def test_a_source_in_use_is_said_so_and_the_rest_follows(source: str, target: str) -> None:
    await create(source, "turns", 1, LOG)
    await fill(source, "turns", 20, partitions=1)
    async with consuming(source, "turns", group_id="headrace-collector") as reader:
        await reader.getone()
        await reader.commit()
        mirrored: MirrorResult = await mirror(source, target)
        assert mirrored.moving == ["group headrace-collector has members"]
        await fill(source, "turns", 10, partitions=1, name="later")
        await reader.seek_to_end()
        await reader.commit({TopicPartition("turns", 0): 25})
    mirrored = await mirror(source, target)
    assert mirrored.moving == []
    assert [log.records for log in mirrored.checked] == [30]
    assert (await next_of(target, "headrace-collector", "turns")).key == b"later5"
    await commit(target, "headrace-collector", {("turns", 0): 28})
    with pytest.raises(MirrorConflict, match=r"group headrace-collector: is at 28 .*in use already"):
        await mirror(source, target)
