"""One suite for the embedded broker and Apache Kafka: every test runs on both unless it says why not."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.contract.bus.clients import eventually

CreateTopic = Callable[..., Awaitable[str]]


@pytest.fixture
async def admin(bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bus)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
def unique() -> str:
    """A name that no other test has."""
    return f"contract-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def create(admin: AIOKafkaAdminClient) -> CreateTopic:
    """`await create(partitions=1, **config)` makes a topic and returns its name. Underscores stand for dots."""

    async def make(partitions: int = 1, **config: object) -> str:
        name = f"contract-{uuid.uuid4().hex[:12]}"
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        response = await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=settings)])
        assert [code for _, code, _ in response.topic_errors] == [0]
        await eventually(lambda: _known(admin, name))
        return name

    return make


async def _known(admin: AIOKafkaAdminClient, topic: str) -> bool:
    """Kafka answers the creation a little before its metadata has the topic."""
    (described,) = await admin.describe_topics([topic])
    return described["error_code"] == 0 and all(p["leader"] >= 0 for p in described["partitions"])


@pytest.fixture
async def topic(create: CreateTopic) -> str:
    """A topic with one partition."""
    return await create()
