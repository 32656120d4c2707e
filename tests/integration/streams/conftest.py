"""Fixture for collector and scorer processes, on a laptop or several machines, with checks of their final events."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter, Event, Experience, Trajectory, Turn
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.ids import derived_id
from tests.support.processes import wait_until
from tests.support.service_process import BusView, ServiceProcess
from tests.support.turns import after, ask, end, feedback, tool, user


@pytest.fixture(
    params=["laptop", pytest.param("cluster", marks=[pytest.mark.kafka, pytest.mark.postgres, pytest.mark.long])]
)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StreamsRig]:
    """Yield a rig before its start: embedded broker, SQLite and single services, or Kafka, PostgreSQL and two of
    each."""
    laptop = request.param == "laptop"
    bus: str = request.getfixturevalue("embedded_bus" if laptop else "kafka_bus")
    url: str = "sqlite" if laptop else request.getfixturevalue("postgres").url()
    async with rig_on(bus, tmp_path, url, replicas=1 if laptop else 2) as streams:
        yield streams


E = TypeVar("E", bound=Event)
REWARDS = """
def right(trajectory):
    return 1.0 if trajectory.final_answer.startswith("right") else 0.0
"""
WAIT_S = 90.0


@contextlib.asynccontextmanager
async def rig_on(bus: str, folder: Path, database_url: str = "sqlite", replicas: int = 1) -> AsyncIterator[StreamsRig]:
    """Yield a rig before its start, and stop it at the end."""
    settings = BusSettings(address=bus)
    await topics.ensure(settings)
    producer = EventProducer(settings, "test", BlobStore(f"file://{folder}/blobs"))
    await producer.start()
    streams = StreamsRig(folder, bus, producer, database_url, replicas)
    try:
        yield streams
    finally:
        await producer.stop()
        streams.stop()


@dataclass
class StreamsRig:
    """Processes of the collector and the scorer by service. Each may be killed and started again."""

    folder: Path
    bus: str
    producer: EventProducer
    database_url: str
    replicas: int
    processes: dict[str, list[ServiceProcess]] = field(default_factory=dict)

    async def start(self) -> None:
        rewards = self.folder / "rewards.py"
        rewards.write_text(REWARDS)
        by_service: dict[str, dict[str, object]] = {
            "collector": {},
            "scorer": {
                "SCORER__FUNCTIONS": [f"{rewards}:right"],
                "SCORER__REQUIRED": ["feedback"],
                "SCORER__LEASE_S": 2,
            },
        }
        for name, settings in by_service.items():
            shared_settings = {"DATABASE__URL": self.database_url, **settings}
            self.processes[name] = [
                ServiceProcess(name, self.folder, self.bus, **shared_settings) for _ in range(self.replicas)
            ]
        for process in self.every:
            process.start(ready=False)
        await asyncio.to_thread(
            wait_until, lambda: all(play_one.healthy() for play_one in self.every), WAIT_S, "all are healthy"
        )

    @property
    def every(self) -> list[ServiceProcess]:
        return [process for processes in self.processes.values() for process in processes]

    async def supervise(self) -> None:
        """Restart ended processes, as `headrace up` does, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            for process in self.every:
                if not process.running():
                    process.start(ready=False)

    def stop(self) -> list[int]:
        return [process.stop() for process in self.every]

    async def read(self, kind: type[E]) -> list[E]:
        """Return every valid event of class `kind` that is on the topic now."""
        blobs = BlobStore(f"file://{self.folder}/blobs")
        return await BusView(BusSettings(address=self.bus), self.producer, blobs).read(kind)


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of an agent: its turns, and the feedback after it."""

    turns: tuple[Turn, ...]
    afterwards: tuple[Event, ...]
    value: float
    right: bool

    @property
    def trajectory_id(self) -> str:
        return derived_id("trajectory", self.turns[0].session_key, self.turns[0].turn_id)

    @property
    def reward(self) -> float:
        return (self.value + self.right) / 2


def episode(name: str, choose: random.Random, *, shared: str | None = None) -> Episode:
    """Return a run with a few turns, then feedback that ends it or is followed by an end.

    Runs with equal `shared` have one session key.
    """
    right, value = choose.random() < 0.5, choose.choice([0.0, 0.5, 1.0])
    turns: list[Turn] = []
    messages = [user("the same question")]
    count = choose.randint(1, 3)
    now = utcnow()
    for at in range(count):
        text = ("right " if right else "wrong ") + name if at == count - 1 else f"look {name} {at}"
        source = "implicit" if shared else "header"
        turn = ask(messages, text, session=shared or name, session_source=source)
        turns.append(turn.model_copy(update={"time": now, "started_at": now}))
        messages = after(turns[-1], tool(f"result {at}"))
    session = turns[0].session_id
    if shared:
        feedback_event = feedback(session, *turns, value=value, ends_session=True, run_id=name)
        return Episode(tuple(turns), (feedback_event,), value, right)
    ends = choose.random() < 0.5
    feedback_event = feedback(session, value=value, ends_session=ends).model_copy(update={"time": now})
    return Episode(tuple(turns), (feedback_event,) if ends else (feedback_event, end(session)), value, right)


async def play(rig: StreamsRig, episodes: Sequence[Episode], choose: random.Random, seconds: float) -> None:
    """Send all events within `seconds`, each once or, as by a gateway that retries, twice."""

    async def play_one(played: Episode) -> None:
        await asyncio.sleep(choose.random() * seconds)
        for event in (*played.turns, *played.afterwards):
            for _ in range(2 if choose.random() < 0.2 else 1):
                await send(event)

    async def send(event: Event) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(Unavailable):
                    return await rig.producer.send(event)
                await asyncio.sleep(0.2)

    await asyncio.gather(*(play_one(played) for played in episodes))


async def account(rig: StreamsRig, episodes: Sequence[Episode]) -> None:
    """Wait for the experience of each episode, then check that no event was lost, duplicated or changed."""
    session_keys = {played.turns[0].session_key for played in episodes}
    expected = {played.trajectory_id: played for played in episodes}
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while True:
        experiences = [experience for experience in await rig.read(Experience) if experience.key in session_keys]
        missing = expected.keys() - {experience.trajectory_id for experience in experiences}
        if not missing:
            break
        assert asyncio.get_running_loop().time() < deadline, f"{len(missing)} of {len(expected)} never came"
        await asyncio.sleep(1.0)
    trajectories = [experience for experience in await rig.read(Trajectory) if experience.key in session_keys]
    assert_equal_facts([*experiences, *trajectories])
    members = {experience.trajectory_id: experience.turn_ids for experience in trajectories}
    assert members == {name: tuple(turn.turn_id for turn in played.turns) for name, played in expected.items()}
    for experience in experiences:
        played = expected[experience.trajectory_id]
        assert (experience.revision, experience.reward, experience.weight) == (0, played.reward, 1.0)
        assert experience.branch is not None
        last = played.turns[-1]
        assert experience.branch.token_ids == last.prompt_token_ids + last.choices[0].token_ids, "bit for bit (P2)"
    assert [letter for letter in await rig.read(DeadLetter) if letter.key in session_keys] == []


def assert_equal_facts(events: Sequence[Event]) -> None:
    """Check that copies of an event are equal, so that consumers that deduplicate by id lose no content."""
    bodies: dict[str, set[bytes]] = defaultdict(set)
    for event in events:
        bodies[event.event_id].add(event.to_json())
    assert {name: len(copies) for name, copies in bodies.items() if len(copies) > 1} == {}
