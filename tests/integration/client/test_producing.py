"""Events from any runtime: the examples of docs/producing.md run, and their events are scored like the rest."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiokafka.partitioner import murmur2

from headrace_runtime.settings.sections import BusSettings
from headrace_schemas import DeadLetter, Experience, Trajectory
from headrace_schemas.values.ids import session_key
from tests.contract.bus.clients import eventually
from tests.docs.fences import fences
from tests.integration.streams.rig import StreamsRig, rig_on
from tests.support import node_client, presence
from tests.support.marks import on_each_bus
from tests.support.service_process import ServiceProcess

ROOT = Path(__file__).resolve().parents[3]
PRODUCERS = ROOT / "examples" / "producers"
CONSUMERS = ROOT / "examples" / "reward_consumers"
COMMANDS = {
    "python": [sys.executable, str(PRODUCERS / "python" / "produce.py")],
    "node": ["node", str(node_client.FOLDER / "node" / "produce.mjs")],
    "shell": [str(PRODUCERS / "shell" / "produce.sh")],
}
NEEDS = {"python": (), "node": ("kafkajs",), "shell": ("kcat", "jq")}


def test_the_documented_event_is_the_example_and_the_example_is_valid() -> None:
    text = (PRODUCERS / "trajectory.json").read_text(encoding="utf-8")
    event = Trajectory.from_json(text.encode())
    assert event.session_key == session_key("default", event.session_id)
    assert event.branches[0].loss_mask == (0, 0, 0, 0, 0, 1, 1, 1)
    json_fences = [fence for fence in fences(ROOT / "docs" / "producing.md") if fence.language == "json"]
    assert json.loads(text) in [json.loads(fence.text) for fence in json_fences]


def test_fifteen_lines_are_enough_with_the_sdk() -> None:
    lines = (CONSUMERS / "with_sdk.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line]) <= 15


@pytest.fixture
async def rig(own_bus: str, tmp_path: Path) -> AsyncIterator[StreamsRig]:
    """A scorer that waits for both of the example's sources, on a bus without models."""
    async with rig_on(own_bus, tmp_path) as streams:
        settings = {"SCORER__REQUIRED": ["short", "polite"]}
        streams.processes = {"scorer": [ServiceProcess("scorer", tmp_path, own_bus, **settings)]}
        with running("with_sdk.py", own_bus, tmp_path), running("without_sdk.py", own_bus, tmp_path):
            streams.every[0].start()
            yield streams


@contextmanager
def running(name: str, bus: str, folder: Path) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(CONSUMERS / name), bus], stdout=log, stderr=log)
    try:
        yield
    finally:
        still = process.poll() is None
        process.terminate()
        process.wait(20)
        assert still, (folder / f"{name}.log").read_text()


def session_for(language: str) -> str:
    """A session that Kafka's partitioner puts elsewhere than librdkafka's own would."""
    while True:
        name = f"{language}-{uuid.uuid4().hex[:12]}"
        key = session_key("default", name).encode()
        if partition_of(key) != zlib.crc32(key) % 4:
            return name


def partition_of(key: bytes) -> int:
    return int((murmur2(key) & 0x7FFFFFFF) % 4)


async def produce(language: str, session: str, bus: str) -> str:
    for name in NEEDS[language]:
        presence.need(name)
    process = await asyncio.create_subprocess_exec(
        *COMMANDS[language], session, bus, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    return printed.decode()


@on_each_bus("own_bus")
@pytest.mark.long
async def test_every_language_is_scored_by_both_consumers(rig: StreamsRig) -> None:
    sessions = {language: session_for(language) for language in COMMANDS}
    skipped = {}
    for language, session in list(sessions.items()):
        try:
            printed = await produce(language, session, rig.bus)
        except pytest.skip.Exception as reason:
            skipped[language] = str(reason)
            del sessions[language]
            continue
        assert session in printed
        match = re.search(r"trajectories\[(\d)\]@\d+", printed)
        if match:
            assert int(match[1]) == partition_of(session_key("default", session).encode())
    keys = {session_key("default", session) for session in sessions.values()}
    experiences: dict[str, Experience] = {}

    async def scored() -> bool:
        experiences.update(
            {
                experience.session_key: experience
                for experience in await rig.read(Experience)
                if experience.session_key in keys
            }
        )
        return experiences.keys() == keys

    await eventually(scored, 60)
    for experience in experiences.values():
        assert experience.reward == pytest.approx((0.9 + 0.0) / 2)
        assert {part.source: part.value for part in experience.parts} == {"short": pytest.approx(0.9), "polite": 0.0}
    assert [letter for letter in await rig.read(DeadLetter) if letter.key in keys] == []
    await partitions_hold(rig, keys)
    if skipped:
        pytest.skip(f"ran all but {skipped}")


async def partitions_hold(rig: StreamsRig, keys: set[str]) -> None:
    """Every event lies where Kafka's own partitioner would have put it."""
    from headrace.topics import Range, connected

    async with connected(BusSettings(address=rig.bus).address) as topics:
        entries = [entry async for entry in topics.read(Range("trajectories", keys=keys))]
    assert {entry.key for entry in entries} == keys
    assert [entry.partition for entry in entries] == [partition_of(entry.key.encode()) for entry in entries]
