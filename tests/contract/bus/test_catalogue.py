"""Topic files on both buses: applied when a topic is made, compared when it is there, and never silently ignored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from structlog.testing import capture_logs

from headrace_runtime.errors import SettingError
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings
from tests.contract.bus.clients import administering
from tests.support.broker_process import BrokerProcess


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
    """Without topics: those that these tests make are wrong."""
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
