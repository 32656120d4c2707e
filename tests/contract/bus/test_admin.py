"""Tests of topic administration by clients on both buses, and of kill -9 under load on the embedded broker."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from structlog.testing import capture_logs

from headrace_runtime.errors import SettingError
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings
from tests.contract.bus.conftest import CreateTopic
from tests.support.presence import draw_seed
from tests.support.servers import BrokerProcess
from tests.support.wire_client import administering, consuming, eventually, everything, producing


async def _codes(admin: AIOKafkaAdminClient, *topics: NewTopic, validate_only: bool = False) -> list[int]:
    response = await admin.create_topics(list(topics), validate_only=validate_only)
    return [code for _, code, *_ in response.topic_errors]


async def _created(admin: AIOKafkaAdminClient, name: str) -> bool:
    return await _codes(admin, NewTopic(name, 1, 1)) == [0]


async def _listed(admin: AIOKafkaAdminClient, name: str) -> bool:
    return name in await admin.list_topics()


async def _absent(admin: AIOKafkaAdminClient, name: str) -> bool:
    return not await _listed(admin, name)


async def test_create_list_describe_delete(bus: str, unique: str, admin: AIOKafkaAdminClient) -> None:
    assert await _codes(admin, NewTopic(unique, 3, 1)) == [0]
    # Kafka's controller answers before its brokers have heard.
    await eventually(lambda: _listed(admin, unique), timeout_s=10)
    (described,) = await admin.describe_topics([unique])
    assert (described["error_code"], described["topic"], len(described["partitions"])) == (0, unique, 3)
    assert sorted(partition["partition"] for partition in described["partitions"]) == [0, 1, 2]
    await admin.delete_topics([unique])
    await eventually(lambda: _absent(admin, unique))


async def test_mistakes_in_a_request(unique: str, admin: AIOKafkaAdminClient) -> None:
    assert await _codes(admin, NewTopic(unique, 1, 1)) == [0]
    assert await _codes(admin, NewTopic(unique, 1, 1)) == [36]
    assert await _codes(admin, NewTopic("no spaces", 1, 1)) == [17]
    assert await _codes(admin, NewTopic(f"{unique}-p", 0, 1)) == [37]
    assert await _codes(admin, NewTopic(f"{unique}-r", 1, 3)) == [38]
    assert await _codes(admin, NewTopic(f"{unique}-c", 1, 1, topic_configs={"cleanup.polcy": "compact"})) == [40]
    assert await _codes(admin, NewTopic(f"{unique}-v", 1, 1, topic_configs={"cleanup.policy": "shred"})) == [40]
    assert await _codes(admin, NewTopic(f"{unique}-n", 1, 1, topic_configs={"retention.ms": "soon"})) == [40]
    assert not [name for name in await admin.list_topics() if name.startswith(f"{unique}-")]


async def test_validation_creates_nothing(unique: str, admin: AIOKafkaAdminClient) -> None:
    assert await _codes(admin, NewTopic(unique, 1, 1), validate_only=True) == [0]
    assert unique not in await admin.list_topics()


async def test_one_bad_topic_does_not_hold_up_the_others(unique: str, admin: AIOKafkaAdminClient) -> None:
    topics = [NewTopic(f"{unique}-a", 1, 1), NewTopic(f"{unique}-b", 1, 5), NewTopic(f"{unique}-c", 1, 1)]
    response = await admin.create_topics(topics)
    assert {name[-1]: code for name, code, _ in response.topic_errors} == {"a": 0, "b": 38, "c": 0}


async def test_configuration_is_kept(create: CreateTopic, admin: AIOKafkaAdminClient) -> None:
    config = {
        "cleanup.policy": "compact",
        "retention.ms": "-1",
        "retention.bytes": "9999999",
        "max.message.bytes": "2000000",
    }
    topic = await create(**{key.replace(".", "_"): value for key, value in config.items()})
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, config)])
    ((code, _, _, name, entries),) = response.resources
    assert (code, name) == (0, topic)
    assert {entry[0]: entry[1] for entry in entries} == config


async def test_configuration_of_an_unknown_topic(unique: str, admin: AIOKafkaAdminClient) -> None:
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, unique)])
    assert response.resources[0][0] == 3


async def test_a_deleted_topic_is_gone_and_its_name_starts_anew(
    bus: str, unique: str, admin: AIOKafkaAdminClient
) -> None:
    partition = TopicPartition(unique, 0)
    await admin.create_topics([NewTopic(unique, 1, 1)])
    async with producing(bus) as producer, consuming(bus, group_id=unique) as consumer:
        await producer.send_and_wait(unique, b"old")
        consumer.assign([partition])
        await consumer.commit({partition: 1})
    await admin.delete_topics([unique])
    await eventually(lambda: _created(admin, unique))
    async with producing(bus) as producer:
        assert (await producer.send_and_wait(unique, b"new")).offset == 0
    assert [record.value for record in await everything(bus, unique)] == [b"new"]
    async with consuming(bus, group_id=unique) as consumer:
        consumer.assign([partition])
        assert await consumer.committed(partition) is None


async def test_deleting_what_does_not_exist(unique: str, admin: AIOKafkaAdminClient) -> None:
    response = await admin.delete_topics([unique])
    assert [code for _, code, *_ in response.topic_error_codes] == [3]


async def test_unknown_topics_in_metadata(unique: str, admin: AIOKafkaAdminClient) -> None:
    described = {entry["topic"]: entry for entry in await admin.describe_topics([unique, "bad name"])}
    assert described[unique]["error_code"] == 3
    assert described["bad name"]["error_code"] == 17


@pytest.mark.parametrize("name", ["x" * 249, "a.b_c-D9"])
async def test_names_that_are_allowed(name: str, admin: AIOKafkaAdminClient) -> None:
    await admin.delete_topics([name])
    await eventually(lambda: _created(admin, name))
    await admin.delete_topics([name])


async def test_every_policy_is_on_the_bus(bus: str, admin: AIOKafkaAdminClient) -> None:
    await topics.ensure(BusSettings(address=bus))
    for topic in topics.catalogue().values():
        (response,) = await admin.describe_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic.name, dict.fromkeys(topic.config))]
        )
        ((code, _, _, _, entries),) = response.resources
        assert (code, {entry[0]: entry[1] for entry in entries}) == (0, topic.config), topic.name
        (described,) = await admin.describe_topics([topic.name])
        assert len(described["partitions"]) == topic.partitions, topic.name
    with capture_logs() as logs:
        await topics.ensure(BusSettings(address=bus))
    assert [line for line in logs if line["event"] == "topic_differs"] == []


@pytest.fixture
async def own_admin(module_bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    async with administering(module_bus) as client:
        yield client
        await client.delete_topics(list(await client.list_topics()))


async def test_what_somebody_changed_stays_and_is_told(module_bus: str, own_admin: AIOKafkaAdminClient) -> None:
    await own_admin.create_topics([NewTopic("routing", 1, 1, topic_configs={"cleanup.policy": "delete"})])
    with capture_logs() as entries:
        await topics.ensure(BusSettings(address=module_bus))
    differences = {(entry["topic"], entry["setting"]): entry for entry in entries if entry["event"] == "topic_differs"}
    policy = differences["routing", "cleanup.policy"]
    assert (policy["bus"], policy["file"], policy["log_level"]) == ("delete", "compact", "warning")
    assert ("routing", "retention.ms") in differences
    assert {topic for topic, _ in differences} == {"routing"}


async def test_topics_of_sessions_with_different_partitions_stop_the_start(
    module_bus: str, own_admin: AIOKafkaAdminClient
) -> None:
    await own_admin.create_topics([NewTopic("turns", 12, 1)])
    with pytest.raises(SettingError, match=r"equal numbers of partitions; they have .*feedback 4.* turns 12"):
        await topics.ensure(BusSettings(address=module_bus))
    assert set(await own_admin.list_topics()) == {"turns"}, "and nothing was made"


def test_each_file_says_how_long_and_how() -> None:
    for topic in topics.catalogue().values():
        assert topic.retention_ms == -1 or topic.retention_ms >= 86_400_000, topic.name
        assert topic.cleanup == ("compact" if topic.name in {"routing", "replicas"} else "delete")


PARTITIONS = 3
KILLS = int(os.environ.get("KILLS", "6"))


class Load:
    """Producer that sends numbered records to one partition, a few in flight, and stores the acknowledged ones by
    offset."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.acknowledged: dict[int, int] = {}
        self.sent = 0
        self.enough = asyncio.Event()

    async def run(self, producer: AIOKafkaProducer) -> None:
        window = asyncio.Semaphore(200)

        async def note(number: int, acknowledgement: asyncio.Future[object]) -> None:
            metadata = await acknowledgement
            self.acknowledged[number] = metadata.offset  # type: ignore[attr-defined]
            window.release()

        async with asyncio.TaskGroup() as group:
            while not self.enough.is_set():
                await window.acquire()
                value = b"%d " % self.sent + bytes(300)
                group.create_task(note(self.sent, await producer.send("ledger", value, partition=self.partition)))
                self.sent += 1


async def _follow(address: str, seen: dict[int, list[int]], stopped: asyncio.Event) -> None:
    """Read through the kills, and store the offsets of every record in `seen`."""
    async with consuming(address, metadata_max_age_ms=1_000) as consumer:
        consumer.assign([TopicPartition("ledger", number) for number in range(PARTITIONS)])
        while not stopped.is_set():
            for partition, records in (await consumer.getmany(timeout_ms=100)).items():
                seen[partition.partition] += [int(record.value.split()[0]) for record in records]
        for partition, end in (await consumer.end_offsets(consumer.assignment())).items():
            async with asyncio.timeout(20):
                while await consumer.position(partition) < end:
                    records = (await consumer.getmany(partition, timeout_ms=100)).get(partition, [])
                    seen[partition.partition] += [int(record.value.split()[0]) for record in records]


@pytest.mark.long
async def test_kill_under_load(tmp_path: Path) -> None:
    seed = draw_seed()
    print(f"KILLS={KILLS}")
    chance = random.Random(seed)
    broker = BrokerProcess(tmp_path)
    broker.start()
    try:
        async with administering(broker.address) as admin:
            await admin.create_topics([NewTopic("ledger", PARTITIONS, 1)])
        loads = [Load(number) for number in range(PARTITIONS)]
        seen: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
        stopped = asyncio.Event()
        options = {"request_timeout_ms": 10_000, "retry_backoff_ms": 50, "metadata_max_age_ms": 1_000}
        async with producing(broker.address, **options) as producer, asyncio.TaskGroup() as group:
            running = [group.create_task(load.run(producer)) for load in loads]
            group.create_task(_follow(broker.address, seen, stopped))
            for _ in range(KILLS):
                before = _acknowledged(loads)
                await asyncio.sleep(chance.uniform(0.1, 0.8))
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
                await eventually(partial(_more_than, loads, before))
            for load in loads:
                load.enough.set()
            await asyncio.wait(running)
            stopped.set()
        for load in loads:
            _check(load, seen[load.partition])
        print(f"{_acknowledged(loads)} acknowledged records over {KILLS} kills: 0 lost, 0 doubled, 0 out of order")
        assert _acknowledged(loads) > 200
    finally:
        broker.stop()


def _acknowledged(loads: list[Load]) -> int:
    return sum(len(load.acknowledged) for load in loads)


async def _more_than(loads: list[Load], before: int) -> bool:
    return _acknowledged(loads) > before


def _check(load: Load, log: list[int]) -> None:
    assert len(log) == len(set(log)), "doubled"
    assert log == sorted(log), "out of order"
    assert load.acknowledged.keys() <= set(log), "lost"
    assert all(log[offset] == number for number, offset in load.acknowledged.items()), "not where it was said to be"
