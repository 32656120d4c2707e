"""Tests of topic administration by clients: creation, description, deletion, and error codes.

Topic files are applied when a topic is created, compared when it exists, and never silently ignored, on both buses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from structlog.testing import capture_logs

from headrace_runtime.errors import SettingError
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings
from tests.contract.bus.clients import administering, consuming, eventually, everything, producing
from tests.contract.bus.conftest import CreateTopic
from tests.support.buses import BrokerProcess


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


@pytest.fixture(scope="module")
def own_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield a bus without topics, because these tests create topics with wrong settings."""
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"))
    broker.start()
    yield broker.address
    broker.stop()


@pytest.fixture
async def own_admin(own_bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    async with administering(own_bus) as client:
        yield client
        await client.delete_topics(list(await client.list_topics()))


async def test_what_somebody_changed_stays_and_is_told(own_bus: str, own_admin: AIOKafkaAdminClient) -> None:
    await own_admin.create_topics([NewTopic("routing", 1, 1, topic_configs={"cleanup.policy": "delete"})])
    with capture_logs() as entries:
        await topics.ensure(BusSettings(address=own_bus))
    differences = {(entry["topic"], entry["setting"]): entry for entry in entries if entry["event"] == "topic_differs"}
    policy = differences["routing", "cleanup.policy"]
    assert (policy["bus"], policy["file"], policy["log_level"]) == ("delete", "compact", "warning")
    assert ("routing", "retention.ms") in differences
    assert {topic for topic, _ in differences} == {"routing"}


async def test_topics_of_sessions_with_different_partitions_stop_the_start(
    own_bus: str, own_admin: AIOKafkaAdminClient
) -> None:
    await own_admin.create_topics([NewTopic("turns", 12, 1)])
    with pytest.raises(SettingError, match=r"equal numbers of partitions; they have .*feedback 4.* turns 12"):
        await topics.ensure(BusSettings(address=own_bus))
    assert set(await own_admin.list_topics()) == {"turns"}, "and nothing was made"


def test_each_file_says_how_long_and_how() -> None:
    for topic in topics.catalogue().values():
        assert topic.retention_ms == -1 or topic.retention_ms >= 86_400_000, topic.name
        assert topic.cleanup == ("compact" if topic.name in {"routing", "replicas"} else "delete")
