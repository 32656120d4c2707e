"""Main functions of each process: the services' own composition roots, and stand-ins for the learner and for parts
without a stream.

It is a back end like any other (`headrace_trainer.learner.Learner`, `tests/contract/learner`); everything around it
(admission, batches, state, saves, versions, rollbacks) is the trainer's own code. The weights of any version therefore
show an experience that was trained twice, and a row whose tokens changed on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import headrace_collector.app
import headrace_registry.app
import headrace_scorer.app
import headrace_trainer.app
from headrace_collector.settings import CollectorSettings
from headrace_gateway.capture.publisher import Publisher
from headrace_gateway.capture.spool import Spool
from headrace_gateway.requests.feedback import LogEnds
from headrace_gateway.settings import CaptureSettings
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import Offsets, TopicTable
from headrace_runtime.kafka.dead_letters import DeadLetterSender
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Event, LoadedVersion, ModelEvent, Probe, Replica, Routing, ServedVersion
from headrace_schemas.values.base import Model
from headrace_schemas.values.blobs import Fingerprint, Manifest
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.learner import (
    GRADIENT_FACTOR,
    Abandoned,
    Abilities,
    Frozen,
    Learner,
    NotFinite,
    StepResult,
    WholeLearner,
)
from headrace_trainer.settings import TrainerSettings
from tests.simulation.process import ProcessSlot, VirtualClock, current, world

MODEL = "m"
MAX_STALENESS = 2
Main = Callable[[], Coroutine[Any, Any, None]]

BASE = Path(__file__).parent / "base"
"""Folder of a base model, whose weights hold no lessons."""
COLLECTOR = CollectorSettings(idle_s=12.0, feedback_wait_s=10.0)
SCORER = ScorerSettings(expected=("feedback",), reward_wait_s=8.0, lease_s=18.0)
REGISTRY = RegistrySettings.model_validate(
    {
        "poll_s": 6.0,
        "lease_s": 24.0,
        "retry_s": 10.0,
        "probe_timeout_s": 30.0,
        "gate": {"margin": 0.4, "anchor_margin": 0.2, "audit_tasks": 4},
    }
)
TRAINER = TrainerSettings.model_validate(
    {
        "base": str(BASE),
        "model": MODEL,
        "batch_experiences": 3,
        "batch_experiences_min": 1,
        "batch_wait_s": 3.0,
        "steps_per_version": 1,
        "max_staleness": MAX_STALENESS,
        "save_interval_s": 2.0,
        "retry_s": 10.0,
        "memory": {"restore_points": 3, "queue_experiences": 12},
    }
)
VOCABULARY = 4096
CONTEXT = 4096
WEIGHTS = "model.safetensors"


def stream_services(common: Common) -> Mapping[str, Main]:
    """Return the `run` function of each stream service, as `headrace_runtime.main` would call it."""
    return {
        "collector": lambda: headrace_collector.app.run(common, COLLECTOR),
        "scorer": lambda: headrace_scorer.app.run(common, SCORER),
        "trainer": lambda: headrace_trainer.app.run(common, TRAINER),
        "registry": lambda: headrace_registry.app.run(common, REGISTRY),
    }


class Gateway:
    """Gateway without HTTP: publisher, spool and routing table. It survives the deaths of its process."""

    def __init__(self, name: str, common: Common, folder: Path) -> None:
        self.name = name
        self._common = common
        self._folder = folder / name
        self._publisher: Publisher | None = None
        self._routing: dict[str, Routing] = {}
        self.slot: ProcessSlot | None = None
        self.spooled = 0
        """Number of events in the spool when it was last checked."""
        self._spool: Spool | None = None

    async def main(self) -> None:
        """Compose the gateway as `headrace_gateway.app.run` does."""
        process, blobs = current(), BlobStore.open(self._common)
        spool = Spool(self._folder, 1 << 24, 1 << 20)
        process.at_death.append(lambda: self._close(spool))
        capture = CaptureSettings(bus_wait_s=1.0)
        bus = self._common.bus
        async with spool, asyncio.TaskGroup() as group:
            publisher = Publisher(
                lambda: EventProducer(bus, "headrace/gateway", blobs),
                spool,
                capture,
                send_timeout_s=bus.request_timeout_s,
                prepare=lambda: topics.ensure(bus),
                log_ends=lambda: LogEnds(Offsets(bus, None, "gateway")),
            )
            producer = EventProducer(bus, "headrace/gateway", blobs)
            table = TopicTable(Routing, bus, "headrace/gateway", blobs, DeadLetterSender("gateway", producer))
            self._routing = table.rows
            group.create_task(publisher.run())
            group.create_task(table.run())
            self._publisher, self._spool = publisher, spool
            await self._measure(spool)

    async def _measure(self, spool: Spool) -> None:
        while True:
            self.spooled = spool.events
            await asyncio.sleep(0.5)

    def _close(self, spool: Spool) -> None:
        """Remove the locks and temporary files of a dead process, as the operating system does."""
        self._publisher = self._spool = None
        spool._log.close()

    @property
    def settled(self) -> bool:
        """Return whether all acknowledged events are on the bus: only then are another gateway's events certain to come
        later.
        """
        return self._spool is not None and self._spool.events == 0

    def now(self) -> datetime:
        """Return the time of the process's clock."""
        return VirtualClock().now() + timedelta(seconds=world().skews_s[self.name])

    async def version(self) -> str:
        while True:
            routing = self._routing.get(MODEL)
            if self._publisher is not None and routing is not None and routing.champion is not None:
                return routing.champion
            await asyncio.sleep(0.3)

    async def publish(self, event: Event) -> bool:
        """Send an event. Wait while the gateway is down, as a client's connection attempts do."""
        while (publisher := self._publisher) is None:  # noqa: ASYNC110 (it looks again, as a client does)
            await asyncio.sleep(0.2)
        assert self.slot is not None
        assert self.slot.process is not None
        process = self.slot.process
        request = process.spawn(publisher.publish(event))
        await asyncio.wait([request])
        if request.cancelled() or process.dead:
            return False
        request.result()
        return True


async def replica(common: Common) -> None:
    """Inference replica without a model: it loads the routed versions and announces them. Some versions fail."""
    blobs = BlobStore.open(common)
    producer = EventProducer(common.bus, "headrace/inference", blobs)
    table = TopicTable(Routing, common.bus, "headrace/inference", blobs, DeadLetterSender("inference", producer))
    name, clock = current().name, VirtualClock()
    started = clock.now()
    await topics.ensure(common.bus)
    while True:
        try:
            await producer.start()
            break
        except Unavailable:
            await asyncio.sleep(0.5)
    async with asyncio.TaskGroup() as group:
        group.create_task(table.run())
        loaded: dict[str, LoadedVersion] = {}
        while True:
            routing = table.rows.get(MODEL)
            routed = routing.serve if routing else ()
            loaded = {served.version: loaded.get(served.version) or _load(blobs, served) for served in routed}
            heartbeat = Replica(
                time=clock.now(),
                replica_id=name,
                url="http://127.0.0.1:1",
                engine="none",
                versions=tuple(loaded.values()),
                capacity=1,
                ttl_s=15.0,
                started_at=started,
            )
            group.create_task(_send(producer, heartbeat))
            await asyncio.sleep(1.5 + world().bus.draw.random())


async def _send(producer: EventProducer, event: Event) -> None:
    try:
        await producer.send(event)
    except Unavailable:
        return  # the next heartbeat is not far


def _load(blobs: BlobStore, served: ServedVersion) -> LoadedVersion:
    """Load a version. Raises `CorruptBlob` or `Unavailable` if it was announced before it was durable (P7)."""
    for file in read_manifest(blobs, served.manifest).files:
        blobs.get(file.blob)
    good = random.Random(served.version).random() > 0.1
    probe = Probe(max_abs_delta=0.0 if good else 9.0, parent_max_abs_delta=0.5, passed=good)
    return LoadedVersion(version=served.version, state="ready" if good else "failed", probe=probe)


class Lesson(Model):
    """Entry of the weights: one row that one step trained."""

    step: int
    experience_id: str
    revision: int
    advantage: float
    tokens_sha256: str

    @classmethod
    def of(cls, row: Row, step: int) -> Lesson:
        return cls(
            step=step,
            experience_id=row.experience_id,
            revision=row.revision,
            advantage=float(row.advantage),
            tokens_sha256=tokens_digest(row.token_ids_T.tolist(), row.loss_mask_T.tolist(), row.behaviour_T.tolist()),
        )


def tokens_digest(token_ids: list[int], mask: list[bool], behaviour: list[float]) -> str:
    """Return the digest of one trained sequence: token ids, loss mask, and the engine's logprobs."""
    return hashlib.sha256(repr((token_ids, list(map(bool, mask)), behaviour)).encode()).hexdigest()


def read(data: bytes) -> tuple[Lesson, ...]:
    """Return the lessons in a version's weights."""
    return tuple(Lesson.model_validate(lesson) for lesson in json.loads(data))


def read_frozen(weights: bytes) -> tuple[Lesson, ...]:
    """Return the lessons in a lineage's saved weights."""
    return read(weights.partition(b"\n")[2])


def pending_lessons(optimizer: bytes) -> tuple[Lesson, ...]:
    """Return the lessons in a lineage's saved optimizer: those of steps that changed no weight."""
    return tuple(Lesson.model_validate(lesson) for lesson in json.loads(optimizer.partition(b"\n")[2])["pending"])


def lessons_of(blobs: BlobStore, manifest: Manifest) -> tuple[Lesson, ...]:
    """Return all lessons of a published version."""
    (weights,) = (file for file in manifest.files if file.path == WEIGHTS)
    return read(blobs.get(weights.blob))


class RememberingLearner(WholeLearner):
    """Learner that appends each trained row to its weights."""

    def __init__(self, lineage: str) -> None:
        self._lineage = lineage
        self.lessons: tuple[Lesson, ...] = ()
        self.pending: tuple[Lesson, ...] = ()
        """Lessons of the last batches whose advantages were all 0. As in every back end, such a batch changes no
        weight, and the next batch that changes weights includes its lessons.
        """
        self.updates = 0

    @property
    def abilities(self) -> Abilities:
        return Abilities(kind="full", vocabulary=VOCABULARY, context=CONTEXT)

    @property
    def failure(self) -> str | None:
        return None

    def sequence_bound(self) -> int:
        return CONTEXT

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if stop.is_set():
            raise Abandoned
        if not all(math.isfinite(row.advantage) for row in batch.rows):
            raise NotFinite
        self.updates += 1
        self.pending += tuple(Lesson.of(row, self.updates) for row in batch.rows)
        moved = any(row.has_advantage for row in batch.rows)
        if moved:
            self.lessons, self.pending = self.lessons + self.pending, ()
        measured = {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0, GRADIENT_FACTOR: batch.token_weight}
        return StepResult(measured | {"step_seconds": 0.0, "tokens_per_second": 0.0}, moved=moved)

    def freeze(self) -> Frozen:
        about = f"training state of lineage {self._lineage}\n".encode()
        optimizer = {"updates": self.updates, "pending": [lesson.model_dump() for lesson in self.pending]}
        return Frozen(about + self._bytes(), about + json.dumps(optimizer).encode())

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        self.lessons = read_frozen(bytes(frozen.weights))
        self.pending = pending_lessons(bytes(frozen.optimizer))
        self.updates = json.loads(bytes(frozen.optimizer).partition(b"\n")[2])["updates"]

    def load(self, folder: Path) -> None:
        self.lessons, self.pending, self.updates = read((folder / WEIGHTS).read_bytes()), (), 0

    def write(self, folder: Path, base: str) -> Fingerprint:
        (folder / WEIGHTS).write_bytes(self._bytes())
        return self._fingerprint(self._bytes())

    def fingerprint_of_base(self) -> Fingerprint:
        return self._fingerprint(b"[]")

    def close(self) -> None:
        """Do nothing, because the learner holds no resources."""

    def _bytes(self) -> bytes:
        return json.dumps([lesson.model_dump() for lesson in self.lessons]).encode()

    @staticmethod
    def _fingerprint(weights: bytes) -> Fingerprint:
        share = int.from_bytes(hashlib.sha256(weights).digest()[:4]) / 2**32
        return Fingerprint(token_ids=(1, 2), logprobs=(-1.0 - share,))


def _open(_folder: Path, settings: TrainerSettings) -> Learner:
    return RememberingLearner(settings.lineage)


BACKEND = Backend(_open)


class Silent:
    """Replacement of `headrace_trainer.report.Reporter` that writes no files."""

    def __init__(self, *_: object) -> None:
        """Ignore the arguments."""

    def report_step(self, measured: Mapping[str, float], state: LineageState) -> None: ...

    def report_version(self, version: str, number: int, step: int) -> None: ...

    def report_stop(self, reason: str | None, state: LineageState) -> None: ...

    def report_decision(self, event: ModelEvent, number: int, step: int) -> None: ...

    def close(self) -> None: ...


AS_TORCH: Mapping[str, Any] = {"headrace_trainer.torch_learner.TORCH": BACKEND}
"""Replacement of the default back end, by the name to patch."""
STANDS_FOR: Mapping[str, Any] = {**AS_TORCH, "headrace_trainer.app.Reporter": Silent}
