"""Test of docs/growing.md: from a laptop to Kafka and PostgreSQL in the middle of a session without starting anew."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import pytest

from headrace_operations.mirror import mirror
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Trajectory, Turn
from tests.contract.bus.clients import eventually
from tests.integration.conftest import wipe
from tests.integration.streams.rig import StreamsRig, assert_equal_facts, rig_on
from tests.support.broker_process import BrokerProcess
from tests.support.postgres_node import PostgresNode
from tests.support.service_process import ServiceProcess
from tests.support.turns import after, ask, end, feedback, user

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.long]
SETTINGS = {"SCORER__REQUIRED": ["feedback"]}


@pytest.fixture
def laptop_bus(tmp_path: Path) -> Iterator[str]:
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker.address
    broker.stop()


@pytest.fixture
async def kafka(own_kafka: str) -> AsyncIterator[str]:
    yield own_kafka
    await wipe(own_kafka)


def services(folder: Path, bus: str, **settings: object) -> dict[str, list[ServiceProcess]]:
    names = ("collector", "scorer")
    return {name: [ServiceProcess(name, folder, bus, **SETTINGS, **settings)] for name in names}


async def test_a_session_that_began_on_a_laptop_ends_on_a_cluster(
    laptop_bus: str, kafka: str, postgres: PostgresNode, tmp_path: Path
) -> None:
    early, late = uuid.uuid4().hex, uuid.uuid4().hex
    first = ask([user("q")], session=late)
    second = ask(after(first, user("go on")), session=late, at=1)
    scored = ask([user("q")], session=early)
    async with rig_on(laptop_bus, tmp_path) as rig:
        rig.processes = services(tmp_path, laptop_bus)
        await start(rig)
        for event in (first, scored, feedback(early, value=0.25), end(early)):
            await rig.producer.send(event)
        await experience(rig, early, 0, 0.25)
        assert rig.stop() == [0, 0]
        rig.processes = {}
        mirrored = await mirror(laptop_bus, kafka)
        assert mirrored.moving == []
        assert set(mirrored.positions) == {"headrace-collector", "headrace-scorer"}

    url = await own_database(postgres)
    for _ in range(2):  # the second time it finds that everything is there
        status, printed = await copy_state(url, tmp_path)
        assert status == 0, printed
        assert "collector: " in printed
        assert "scorer: " in printed

    blobs = BlobStore(f"file://{tmp_path}/blobs")
    producer = EventProducer(BusSettings(address=kafka), "test", blobs)
    await producer.start()
    rig = StreamsRig(tmp_path, kafka, producer, url, 1, services(tmp_path, kafka, DATABASE__URL=url))
    try:
        await start(rig)
        for event in (second, feedback(late, value=1.0), end(late), feedback(early, value=0.75, at=90)):
            await producer.send(event)
        await experience(rig, late, 0, 1.0)
        await experience(rig, early, 1, 0.75)
        trajectories = [
            trajectory for trajectory in await rig.read(Trajectory) if trajectory.session_id in (early, late)
        ]
        assert_equal_facts(trajectories)  # what a service still owed when it was stopped, it sends again
        assert {trajectory.turn_ids for trajectory in trajectories} == {
            (scored.turn_id,),
            (first.turn_id, second.turn_id),
        }
        assert len({trajectory.event_id for trajectory in trajectories}) == 2
        assert {trajectory.turn_id for trajectory in await rig.read(Turn)} >= {
            first.turn_id,
            second.turn_id,
            scored.turn_id,
        }
    finally:
        rig.stop()
        await producer.stop()
    status, printed = await copy_state(url, tmp_path)
    assert status == 1, "what has moved on is not mixed with what was"
    assert 'DROP SCHEMA "collector" CASCADE' in printed


async def copy_state(url: str, folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "headrace_runtime.copy_state", url]
    environ = {"HEADRACE_DATA_DIR": str(folder), "PATH": ""}
    process = await asyncio.to_thread(subprocess.run, command, env=environ, capture_output=True, text=True, check=False)
    return process.returncode, process.stdout + process.stderr


async def own_database(node: PostgresNode) -> str:
    """Create a database for this test and return its URL, because other tests' services use the default database."""
    name = f"growing_{uuid.uuid4().hex[:8]}"
    connection = await asyncpg.connect(node.url())
    try:
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()
    return node.url(name)


async def start(rig: StreamsRig) -> None:
    for process in rig.every:
        process.start(ready=False)

    async def healthy() -> bool:
        return all([await asyncio.to_thread(process.healthy) for process in rig.every])

    await eventually(healthy, 90)


async def experience(rig: StreamsRig, session: str, revision: int, reward: float) -> None:
    async def arrived() -> bool:
        experiences = [candidate for candidate in await rig.read(Experience) if candidate.session_id == session]
        return (revision, reward) in [(candidate.revision, candidate.reward) for candidate in experiences]

    await eventually(arrived, 60)
