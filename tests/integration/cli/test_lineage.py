"""Test that `models why` and `sessions where` over a bus agree with a generated history of 1,000 sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.producing import Outgoing, producing
from headrace.topics import Entry, Range, connected
from headrace_operations.lineage.sessions import trace_session
from headrace_operations.lineage.versions import trace_version
from headrace_runtime.kafka.topics import ensure
from headrace_runtime.settings.sections import BusSettings
from headrace_schemas import Experience
from tests.support.buses import BrokerProcess
from tests.support.training_history import TOPICS, assert_traces_agree, made_up, recorded

SESSIONS = 1000


@pytest.fixture
def empty_bus(tmp_path: Path) -> Iterator[str]:
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker.address
    broker.stop()


async def test_why_and_where_agree_with_the_history(empty_bus: str) -> None:
    await ensure(BusSettings(address=empty_bus))
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    history = made_up(seed, SESSIONS, 60)
    async with producing(empty_bus, "test") as producer:
        await producer.send([Outgoing.of(event, "test") for event in history.events])
    entries: dict[str, list[Entry]] = {}
    async with connected(empty_bus) as topics:
        for topic in TOPICS:
            entries[topic] = [entry async for entry in topics.read(Range(topic))]
        read_once = recorded(entries)
        await assert_traces_agree(read_once, history)
        for session in history.chance.sample(sorted(history.sessions), 5):
            trace = await trace_session(topics, session, tenant="default", after=0, limit=1000)
            assert trace == await trace_session(read_once, session, tenant="default", after=0, limit=1000)
        version = history.chance.choice(sorted(history.contents))
        asked_why = await trace_version(topics, version, everything=True, after=0, limit=1000)
        for change in asked_why.entries:
            assert change.partition is not None
            history_entry = next(
                e for e in entries[Experience.topic] if (e.partition, e.offset) == (change.partition, change.offset)
            )
            assert isinstance(history_entry.event, Experience)
            assert (history_entry.event.experience_id, history_entry.event.revision) == (
                change.experience_id,
                change.revision,
            )
