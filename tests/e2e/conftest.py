"""Parts of the whole circle: the e-mail agent's base model, two buses, two databases, a judge's endpoint."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support import fake_llm, presence
from tests.support.fake_llm import FakeLLM
from tests.support.kafka_node import KafkaNode
from tests.support.postgres_node import PostgresNode

ROOT = Path(__file__).resolve().parents[2]

CACHE = ROOT / ".cache" / "demo"
"""Folder in which `headrace demo` keeps its base models."""
WARM_UP_STEPS = 50
"""An eighth of the example's: such a model calls tools, and is still wrong nearly always."""

EMBEDDED, SERVERS = "embedded broker + SQLite", "Apache Kafka + PostgreSQL"


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The e-mail agent's, hardly warmed up: a few seconds, and none once it has been built."""
    import torch

    from email_agent.build_base import LESSON
    from email_agent.warm_up import Schedule

    torch.set_num_threads(1)  # so small a model gains nothing from a second one, and loses much on a busy machine
    folder: Path = LESSON.build(CACHE, LESSON.recipe(schedule=Schedule(steps=WARM_UP_STEPS)))
    return folder


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
