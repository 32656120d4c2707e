"""Fixtures for replays: a small live system with a broker, a trainer, and consumer groups with uncommitted records."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from headrace.topics import Range, connected
from headrace_runtime.kafka import topics as catalogue
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event
from tests.integration.conftest import TrainerProcess
from tests.support import tiny_model
from tests.support.wire_client import administering

LIVE = ("headrace-collector", "headrace-scorer", "headrace-judge")
WAIT_S = 120.0
Offsets = dict[tuple[str, str, int], int]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("replay") / "base", layers=1)


@pytest.fixture
def own_bus(request: pytest.FixtureRequest) -> str:
    """Return the address of an embedded broker for this test, or of the shared Kafka if the parameter is `kafka`."""
    is_kafka = getattr(request, "param", "embedded") == "kafka"
    address: str = request.getfixturevalue("kafka_bus" if is_kafka else "empty_bus")
    return address


@dataclass
class ReplayRig:
    """Live system. `send` publishes events, and `headrace` runs the command as a user does."""

    bus: str
    data_dir: Path
    base: Path
    producer: EventProducer
    model: str
    settings: dict[str, object]

    async def send(self, *events: Event) -> None:
        for event in events:
            await self.producer.send(event)

    async def read(self, kind: type[Event], topic: str | None = None) -> list[Any]:
        """Return the events of class `kind` on its topic, or on the copy `topic`, without duplicates."""
        events: dict[str, Event] = {}
        async with connected(self.bus) as topics:
            async for record in topics.records(Range(topic or kind.topic)):
                event = kind.from_json(record.value)
                events[event.event_id] = event
        return list(events.values())

    async def until(self, label: str, condition: Callable[[list[Any]], object], kind: type[Event]) -> list[Any]:
        """Wait until `condition` holds for the events of class `kind`, and return them."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not condition(events := await self.read(kind)):
            assert asyncio.get_running_loop().time() < deadline, f"{label}: not after {WAIT_S} s; {events[-3:]}"
            await asyncio.sleep(0.2)
        return events

    async def headrace(self, *arguments: str, status: int = 0) -> str:
        """Return the output of `headrace replay ...`; its standard error is in the failure message."""
        program = "from headrace_cli.app import main; main()"
        settings = {"trainer.base": self.base, "bus.address": self.bus, "data_dir": self.data_dir}
        settings |= {"trainer.steps_per_version": 1, "trainer.max_staleness": 4, **self.settings}
        environ = {f"HEADRACE_{name.upper().replace('.', '__')}": str(value) for name, value in settings.items()}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, "replay", *arguments, env={**os.environ, **environ, "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, error = await process.communicate()
        assert process.returncode == status, f"status {process.returncode}\n{out.decode()}\n{error.decode()}"
        return out.decode() + (error.decode() if status else "")

    async def report(self, *arguments: str) -> dict[str, Any]:
        report = json.loads(await self.headrace(*arguments, "--json"))
        assert isinstance(report, dict)
        return report

    async def take_part(self, group: str, topic: str, records: int) -> None:
        """Join a live group, read and commit up to `records` records, and leave."""
        reader = AIOKafkaConsumer(
            topic, bootstrap_servers=self.bus, group_id=group, enable_auto_commit=False, auto_offset_reset="earliest"
        )
        await reader.start()
        try:
            await reader.getmany(timeout_ms=20_000, max_records=records)
            await reader.commit()
        finally:
            await reader.stop()

    async def live_state(self) -> tuple[Offsets, dict[str, dict[int, int]], set[str]]:
        """Return the committed offsets of the live groups, the ends of the live topics, and the names of all groups."""
        async with administering(self.bus) as admin:
            committed: Offsets = {}
            for group in LIVE:
                for partition, metadata in (await admin.list_consumer_group_offsets(group)).items():
                    assert isinstance(partition, TopicPartition)
                    committed[group, partition.topic, partition.partition] = metadata.offset
            groups = {name for name, *_ in await admin.list_consumer_groups()}
        async with connected(self.bus) as topics:
            return committed, await topics.ends(sorted(catalogue.catalogue())), groups


@pytest.fixture
async def rig(own_bus: str, base: Path, tmp_path: Path) -> AsyncIterator[ReplayRig]:
    settings = BusSettings(address=own_bus)
    await catalogue.ensure(settings)
    data_dir = tmp_path / "data"
    producer = EventProducer(settings, "test", BlobStore((data_dir / "blobs").as_uri()))
    await producer.start()
    model = f"m-{uuid.uuid4().hex[:8]}"
    yield ReplayRig(own_bus, data_dir, base, producer, model, {"trainer.model": model})
    await producer.stop()


@pytest.fixture
def live_trainer(rig: ReplayRig, tmp_path: Path) -> Iterator[TrainerProcess]:
    """Yield a trainer that cuts batches of 8 experiences, or of those of one second, as replays with equal settings
    do."""
    trainer_settings = {
        "MODEL": rig.model,
        "BATCH_EXPERIENCES": 8,
        "BATCH_EXPERIENCES_MIN": 1,
        "BATCH_WAIT_S": 1.0,
        "SAVE_INTERVAL_S": 0.2,
    }
    process = TrainerProcess(tmp_path, rig.bus, rig.base, MAX_STALENESS=2, **trainer_settings)
    names = {
        "trainer.max_staleness": 2,
        **{f"trainer.{name.lower()}": value for name, value in trainer_settings.items()},
    }
    rig.settings |= {name: str(value) for name, value in names.items()}
    process.begin()
    yield process
    process.kill()
