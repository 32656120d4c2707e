"""One run of the simulation: the bus, the services, the agents, the faults, and the check that all work is finished
within a bounded time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headrace_runtime.errors import Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint, Experience, TrainingMetrics, Trajectory
from headrace_schemas.events.envelope import Envelope
from headrace_trainer.lineage.saved import SavedState
from headrace_trainer.lineage.store import LineageStore
from tests.simulation import agents, faults
from tests.simulation.agents import Ledger
from tests.simulation.bus import Bus, Log, Server, picture_of
from tests.simulation.process import CURRENT, Mishaps, Process, ProcessSlot, Trace, VirtualClock
from tests.simulation.services import Gateway, Lesson, lessons_of, replica, stream_services
from tests.simulation.substitutes import BLOBS, common

QUIET_MAX_S = 300.0
"""Seconds after the last fault within which all work must be finished."""
_AGENTS_MAX_S = 200.0
_LOOK_S = 2.0
_STILL = 3
"""Number of successive checks that must find no open work, because work may be in memory alone for a moment."""


class Cluster:
    """Parts of a run. All randomness comes from the seed, with a separate generator for each use."""

    request_timeout_s = 3.0

    def __init__(self, seed: int, folder: Path, *, verbose: bool = False) -> None:
        self.seed = seed
        self.trace = Trace(verbose=verbose)
        self.bus = Bus(random.Random(f"bus {seed}"), self.trace)
        self.injected: Counter[str] = Counter()
        self.mishaps = Mishaps(self.count)
        self.ledger = Ledger()
        self.log = Log(self.bus)
        self.databases: dict[str, Server] = {}
        self.training_s = 0.02
        """Delay of the trainer's thread for each piece of work."""
        self.skews_s: dict[str, float] = {}
        """Error of each process's clock, drawn at the start and with each step of the clock."""
        self.slots: list[ProcessSlot] = []
        self.problems: list[str] = []
        """Actions of a process that no process may take."""
        self.blobs = BlobStore(BLOBS)
        self._draw = random.Random(f"town {seed}")  # another word would be another run for each seed
        self._common = common(self.request_timeout_s, folder / "data")
        self.gateways = [Gateway(f"gateway-{number}", self._common, folder) for number in (1, 2)]
        self._tasks: set[asyncio.Task[Any]] = set()

    def count(self, fault: str) -> None:
        self.injected[fault] += 1
        self.trace("took_place", fault)

    def thread_delay_s(self) -> float:
        """Return the delay of work that the running process gives to a thread, in seconds."""
        process = CURRENT.get()
        if process is not None and process.service == "trainer":
            return self._draw.random() * self.training_s * 2
        return self._draw.random() * 1e-3

    async def play(self) -> None:
        """Run from the first process to the last event. Raises `rest.Restless` if some work is never finished."""
        await self._prepare()
        for slot in self.slots:
            self.do(slot.run())
        await self.gateways[0].version()
        workers = self._agents()
        self.do(self._criticise())
        begun_s = asyncio.get_running_loop().time()
        await faults.inject(self, faults.plan(random.Random(f"faults {self.seed}")))
        await asyncio.sleep(max(0.0, begun_s + faults.SPAN_S + 2.0 - asyncio.get_running_loop().time()))
        self.heal()
        _, pending = await asyncio.wait(workers, timeout=_AGENTS_MAX_S)
        for worker in workers - pending:
            worker.result()
        await wait_until_finished(self, QUIET_MAX_S)

    def heal(self) -> None:
        """Stop all faults."""
        self.trace("heal")
        self.bus.outage.until_s = 0.0
        self.bus.held_back.clear()
        self.bus.slow_s = self.bus.repeat = 0.0
        self.training_s = 0.02
        self.mishaps.heal()

    def do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background until the run ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    def end(self) -> None:
        """Kill every process, so that only durable state is checked."""
        for slot in self.slots:
            if slot.process is not None:
                slot.process.die()

    async def _prepare(self) -> None:
        for service in ("collector", "scorer", "registry"):
            self.databases[service] = Server(await picture_of(service, f"headrace_{service}"))
        replicas = {"collector": self._draw.choice([1, 2]), "scorer": self._draw.choice([1, 2])}
        for service, main in stream_services(self._common).items():
            for number in range(replicas.get(service, 1)):
                self._add(f"{service}-{number + 1}", service, main)
        for gateway in self.gateways:
            gateway.slot = self._add(gateway.name, "gateway", gateway.main)
        for number in range(self._draw.choice([1, 2])):
            self._add(f"replica-{number + 1}", "inference", partial(replica, self._common))

    def _add(self, name: str, service: str, main: Callable[[], Coroutine[Any, Any, None]]) -> ProcessSlot:
        slot = ProcessSlot(name, service, main, lambda: self._draw.uniform(0.2, 3.0), self._born, self._ended)
        self.slots.append(slot)
        self.skews_s[name] = self._draw.uniform(-faults.SKEW_MAX_S, faults.SKEW_MAX_S)
        return slot

    def _born(self, process: Process) -> None:
        self.trace("starts", process.name, process.life)

    def _ended(self, process: Process, error: BaseException | None) -> None:
        self.trace("ends", process.name, process.life, type(error).__name__ if error else "")
        if error is not None and not _expected(error):
            self.problems.append(f"{process.name} ended by {error!r}")

    def _agents(self) -> set[asyncio.Task[None]]:
        draw = random.Random(f"agents {self.seed}")
        names = set()
        for run in agents.runs(draw, draw.randint(6, 11)):
            chance = random.Random(f"{self.seed} {run.name}")
            doors = self.gateways if not run.implied else self.gateways[:1]
            agent = agents.Agent(run, doors, self.ledger, chance, evaluation=draw.random() < 0.08)
            names.add(self.do(agent.work(draw.uniform(0.0, faults.SPAN_S - 4.0))))
        return names

    async def _criticise(self) -> None:
        """Act as a third party that reads trajectories and publishes rewards, sometimes twice."""
        draw = random.Random(f"critic {self.seed}")
        seen: set[str] = set()
        while True:
            await asyncio.sleep(1.0)
            for trajectory in self.log.all(Trajectory):
                if trajectory.trajectory_id in seen:
                    continue
                seen.add(trajectory.trajectory_id)
                for revision in range(draw.choice([0, 0, 0, 1, 2])):
                    self.do(self._send_verdict(trajectory, revision, draw))

    async def _send_verdict(self, about: Trajectory, revision: int, draw: random.Random) -> None:
        verdict = agents.verdict(about, revision, draw, VirtualClock().now())
        self.ledger.critic.append(verdict)
        self.ledger.unsaid += 1
        await asyncio.sleep(draw.uniform(0.0, 12.0))
        self.ledger.unsaid -= 1
        topic_partition = self.bus.partitions_of(verdict.topic)[
            self.bus.partition_of(verdict.topic, verdict.key.encode())
        ]
        headers = Envelope.of(verdict, "critic").headers()
        self.bus.append(topic_partition, verdict.key.encode(), verdict.to_json(), headers, "critic")


def _expected(error: BaseException) -> bool:
    """Return whether a service may end with this error and be restarted, because a dependency was away for too long."""
    if isinstance(error, BaseExceptionGroup):
        return all(_expected(part) for part in error.exceptions)
    return isinstance(error, Unavailable)


class Restless(AssertionError):
    """Error of a run in which work remains after the time limit."""


async def wait_until_finished(cluster: Cluster, limit_s: float) -> None:
    """Wait until no work is left."""
    deadline = asyncio.get_running_loop().time() + limit_s
    still = 0
    while still < _STILL:
        await asyncio.sleep(_LOOK_S)
        left = next(unfinished(cluster), None)
        still = 0 if left else still + 1
        if left and asyncio.get_running_loop().time() > deadline:
            raise Restless(f"not at rest {limit_s:g} s after the last fault: {'; '.join(unfinished(cluster))}")


def unfinished(cluster: Cluster) -> Iterator[str]:
    """Yield the open work that is visible from outside."""
    yield from (f"{run.name} has not finished" for run in cluster.ledger.runs if not run.over)
    yield from (f"{cluster.ledger.unsaid} rewards have not been said" for _ in range(bool(cluster.ledger.unsaid)))
    yield from (
        f"{gateway.name} has {gateway.spooled} events spooled" for gateway in cluster.gateways if gateway.spooled
    )
    yield from (f"{slot.name} does not run" for slot in cluster.slots if slot.process is None)
    yield from _unread(cluster)
    for service in cluster.databases:
        yield from _unsent(cluster, service)
    collector, scorer = cluster.databases["collector"].connection, cluster.databases["scorer"].connection
    yield from _rows(collector, "SELECT count(*) FROM ends", "ends wait")
    yield from _rows(collector, "SELECT count(*) FROM sessions WHERE open_turns > 0", "sessions are open")
    yield from _rows(collector, "SELECT count(*) FROM feedback WHERE NOT resolved", "feedback waits for its target")
    yield from _rows(scorer, "SELECT count(*) FROM jobs", "calls of reward functions wait")
    yield from _rows(scorer, "SELECT count(*) FROM trajectories WHERE settle_ms IS NOT NULL", "rewards are to settle")
    yield from _untrained(cluster)
    registry = cluster.databases["registry"].connection
    waiting = "SELECT count(*) FROM versions WHERE state IN ('registered', 'probing', 'evaluating')"
    yield from _rows(registry, waiting, "versions are to be decided about")


def _unread(cluster: Cluster) -> Iterator[str]:
    for name, topics in (
        ("headrace-collector", ("turns", "feedback", "session-ends")),
        ("headrace-scorer", ("trajectories", "rewards", "feedback")),
    ):
        committed = cluster.bus.group(name).committed
        for topic_partition in (
            topic_partition for topic in topics for topic_partition in cluster.bus.partitions_of(topic)
        ):
            at, end = committed.get(topic_partition, 0), cluster.bus.end(topic_partition)
            if at != end:
                yield f"{name} has read {topic_partition.topic}[{topic_partition.partition}] to {at} of {end}"
    rows = cluster.databases["registry"].connection.execute(
        "SELECT next_offset FROM positions WHERE topic = 'checkpoints'"
    )
    if (rows.fetchone() or (0,))[0] != cluster.bus.end(cluster.bus.partitions_of("checkpoints")[0]):
        yield "the registry has not read all checkpoints"


def _unsent(cluster: Cluster, service: str) -> Iterator[str]:
    """Yield unsent outbox rows. A row stays until the transaction after its acknowledgement: the bus decides."""
    for topic, headers in cluster.databases[service].connection.execute("SELECT topic, headers FROM outbox"):
        event_id = dict(json.loads(headers))["ce_id"].encode()
        if not any(dict(record.headers).get("ce_id") == event_id for record in cluster.bus.records(topic)):
            yield f"{service} owes an event on {topic}"


def _rows(database: sqlite3.Connection, query: str, label: str) -> Iterator[str]:
    (count,) = database.execute(query).fetchone()
    if count:
        yield f"{count} {label}"


def _untrained(cluster: Cluster) -> Iterator[str]:
    saved = saved_lineage(cluster)
    if saved is None:
        yield "there is no lineage"
        return
    decided = {
        (outcome.experience_id, outcome.revision)
        for report in cluster.log.all(TrainingMetrics)
        for outcome in report.verdicts
    }
    for experience in cluster.log.all(Experience):
        if (experience.experience_id, experience.revision) not in decided:
            yield f"experience {experience.experience_id} revision {experience.revision} has no verdict"
    if saved.waiting:
        yield f"{len(saved.waiting)} experiences wait for a batch"


def saved_lineage(cluster: Cluster, name: str = "main") -> SavedState | None:
    """Return the state of the trainer's last save."""
    return LineageStore(cluster.blobs, name).read()


def saved_optimizer(cluster: Cluster, name: str = "main") -> bytes:
    """Return the optimizer in the trainer's last save."""
    store = LineageStore(cluster.blobs, name)
    saved = store.read()
    assert saved is not None
    return store.get(saved.present.optimizer)


def lessons(cluster: Cluster) -> Mapping[str, tuple[Lesson, ...]]:
    """Return the lessons of every published version."""
    by_version: dict[str, tuple[Lesson, ...]] = {}
    for checkpoint in cluster.log.all(Checkpoint):
        by_version[checkpoint.version] = lessons_of(cluster.blobs, read_manifest(cluster.blobs, checkpoint.manifest))
    return by_version
