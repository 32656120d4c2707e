"""Tests of `headrace up` with real services: requests, kill -9, a clean end, and growth to a cluster in a session."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import pytest

from headrace import Client
from headrace_operations.mirror import mirror
from headrace_operations.supervisor import NotRunning, RunState, read
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Trajectory, Turn
from tests.integration.conftest import wipe
from tests.integration.streams.conftest import StreamsRig, assert_equal_facts, rig_on
from tests.support.processes import alive, wait_until
from tests.support.servers import PostgresNode
from tests.support.service_process import ServiceProcess
from tests.support.turns import after, ask, end, feedback, user
from tests.support.wire_client import eventually

HEADRACE = str(Path(sys.executable).with_name("headrace"))
SERVICES = ("broker", "gateway", "registry")
SETTINGS = {"SCORER__REQUIRED": ["feedback"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up") / "data"


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[subprocess.Popen[str]]:
    chosen = [word for name in SERVICES for word in ("--only", name)]
    command = [HEADRACE, "up", "--data-dir", str(folder), "--auto-ports", *chosen, "--set", "registry.poll_s=0.5"]
    environ = {**os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
    yield process
    process.kill()
    process.wait()


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *arguments], capture_output=True, text=True, check=False, timeout=60)


def run_of(folder: Path) -> RunState | None:
    try:
        return read(folder)
    except NotRunning:
        return None


def test_one_table_says_where_everything_is(up: subprocess.Popen[str], folder: Path) -> None:
    assert up.stdout is not None
    lines: list[str] = []
    while "Ctrl-C" not in (line := up.stdout.readline()):
        assert line, "it ended: " + "".join(lines)
        lines.append(line)
    state = read(folder)
    text = "".join(lines)
    for name in SERVICES:
        row = next(line for line in lines if line.strip().startswith(name))
        assert state.services[name].url in row
    assert f"base_url  {state.base_url}" in text
    assert "no model is served yet" in text
    assert "trainer is not started" in text


def test_a_second_one_is_refused(up: subprocess.Popen[str], folder: Path) -> None:
    process = headrace("up", "--data-dir", str(folder), "--auto-ports")
    assert (process.returncode, "Headrace is up already" in process.stderr) == (2, True)


def test_what_the_client_sends_is_on_the_bus(up: subprocess.Popen[str], folder: Path, tmp_path: Path) -> None:
    state = read(folder)
    name = "run 7/%2F?#"  # all of it has to be quoted in a path
    with Client(state.base_url or "") as client, client.session(name, task_id="t") as session:
        receipt = session.feedback(0.5, context={"expected": "42"})
        session.feedback(0.5, context={"expected": "42"}, feedback_id=receipt)
    path = tmp_path / "feedback.jsonl"
    process = headrace("replay", "events", "feedback", "--session", name, "-d", str(folder), "-o", str(path))
    assert process.returncode == 0, process.stderr
    assert "feedback: 2 events of 2 records in the range" in process.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 1, "sent twice, one feedback"
    assert lines[0]["event"]["value"] == 0.5
    assert lines[0]["event"]["task_id"] == "t"
    ends = headrace("replay", "events", "session-ends", "--session", name, "-d", str(folder))
    assert json.loads(ends.stdout)["event"]["session_id"] == name


def test_status_with_an_account_that_adds_up(up: subprocess.Popen[str], folder: Path) -> None:
    process = headrace("status", "-d", str(folder), "--json")
    assert process.returncode == 0, process.stderr
    status = json.loads(process.stdout)
    assert set(status["run"]["services"]) == set(SERVICES)
    assert status["run"]["services"]["registry"]["status"] == "ready"
    assert status["run"]["services"]["gateway"]["lacks"] == ["routing"]
    assert status["account"]["captured"] == 0
    assert status["models"] == []
    assert "listening" in headrace("logs", "registry", "-d", str(folder)).stdout


def test_a_killed_service_comes_back_where_it_was(up: subprocess.Popen[str], folder: Path) -> None:
    before = read(folder).services["registry"]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: _restarted(folder), 30, "the registry's second life")
    after = read(folder).services["registry"]
    assert (after.url, after.restarts) == (before.url, 1)


def _restarted(folder: Path) -> bool:
    service = read(folder).services["registry"]
    return service.restarts == 1 and service.status == "ready"


def test_ctrl_c_ends_everything(up: subprocess.Popen[str], folder: Path) -> None:
    pids = [service.pid for service in read(folder).services.values() if service.pid]
    up.send_signal(signal.SIGINT)
    assert up.wait(40) == 0
    assert not any(alive(pid) for pid in pids)
    assert run_of(folder) is None


@pytest.fixture
async def kafka(own_kafka: str) -> AsyncIterator[str]:
    yield own_kafka
    await wipe(own_kafka)


def services(folder: Path, bus: str, **settings: object) -> dict[str, list[ServiceProcess]]:
    names = ("collector", "scorer")
    return {name: [ServiceProcess(name, folder, bus, **SETTINGS, **settings)] for name in names}


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.long
async def test_a_session_that_began_on_a_laptop_ends_on_a_cluster(
    empty_bus: str, kafka: str, postgres: PostgresNode, tmp_path: Path
) -> None:
    early, late = uuid.uuid4().hex, uuid.uuid4().hex
    first = ask([user("q")], session=late)
    second = ask(after(first, user("go on")), session=late, at=1)
    scored = ask([user("q")], session=early)
    async with rig_on(empty_bus, tmp_path) as rig:
        rig.processes = services(tmp_path, empty_bus)
        await start(rig)
        for event in (first, scored, feedback(early, value=0.25), end(early)):
            await rig.producer.send(event)
        await experience(rig, early, 0, 0.25)
        assert rig.stop() == [0, 0]
        rig.processes = {}
        mirrored = await mirror(empty_bus, kafka)
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
