"""Topics from outside: creating, describing, deleting, and how mistakes are answered."""

from __future__ import annotations

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.contract.bus.clients import consuming, eventually, everything, producing
from tests.contract.bus.conftest import CreateTopic


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
