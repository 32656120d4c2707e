"""Parts of the whole circle: the e-mail agent's base model, two buses, two databases, a judge's endpoint."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.e2e import circle
from tests.support import fake_llm, presence
from tests.support.fake_llm import FakeLLM
from tests.support.servers import KafkaNode, PostgresNode

EMBEDDED, SERVERS = "embedded broker + SQLite", "Apache Kafka + PostgreSQL"


@pytest.fixture(scope="session")
def base_model() -> Path:
    return circle.base_model()


@pytest.fixture(scope="module")
def judge_llm() -> Iterator[FakeLLM]:
    """Endpoint of the judge: a model that gives every answer full marks."""
    with FakeLLM(fake_llm.verdict(outcome=4, grounding=4, conduct=5, clarity=5)) as llm:
        yield llm


@pytest.fixture(
    scope="module",
    params=[EMBEDDED, pytest.param(SERVERS, marks=[pytest.mark.kafka, pytest.mark.postgres])],
)
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """The settings that choose bus and database. Kafka is one of its own: accounts are about everything on a bus."""
    if request.param == EMBEDDED:
        presence.used.add(f"the whole circle on {EMBEDDED}")
        yield {}
        return
    presence.need("kafka")
    presence.need("postgres")
    postgres: PostgresNode = request.getfixturevalue("postgres")
    kafka = KafkaNode(tmp_path_factory.mktemp("kafka-e2e"), brief=True)
    try:
        kafka.start()
        presence.used.add(f"the whole circle on {SERVERS}")
        yield {"bus.address": kafka.address, "database.url": asyncio.run(_new_database(postgres))}
    finally:
        kafka.stop()


async def _new_database(postgres: PostgresNode) -> str:
    name = f"e2e_{uuid.uuid4().hex[:8]}"
    address = postgres.url().replace("postgresql://", "postgresql+asyncpg://")
    engine = create_async_engine(address, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name}"))
    await engine.dispose()
    return postgres.url(name)
