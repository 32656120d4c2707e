"""Fixtures of one test suite for the embedded broker and Apache Kafka. Each test runs on both, or states why not."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.support import wire_client
from tests.support.wire_client import administering

CreateTopic = Callable[..., Awaitable[str]]


@pytest.fixture
async def admin(bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    async with administering(bus) as client:
        yield client


@pytest.fixture
def unique() -> str:
    """Return a name that no other test uses."""
    return f"contract-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def create(admin: AIOKafkaAdminClient) -> CreateTopic:
    """Return a function that creates a topic: `await create(partitions=1, **config)` returns its name.

    Underscores in `config` stand for dots.
    """

    async def make(partitions: int = 1, **config: object) -> str:
        name = f"contract-{uuid.uuid4().hex[:12]}"
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        await wire_client.create(admin, name, partitions, settings)
        return name

    return make


@pytest.fixture
async def topic(create: CreateTopic) -> str:
    """Create a topic with one partition, and return its name."""
    return await create()
