"""Registry without a bus, for tests: real database and blobs, a clock that stands still, and simulated replicas and
gate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self, TypeVar

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.app import traffic_handlers
from headrace_registry.control.model_controller import ModelController
from headrace_registry.control.rollout_reports import ReportWriter
from headrace_registry.control.traffic import TurnHandler
from headrace_registry.gate.gate import GateFailed
from headrace_registry.rollouts.settings import EVENTS_PER_UNIT_MAX
from headrace_registry.settings import GateSettings, RegistrySettings
from headrace_registry.shadow.runner import PromptSampler, ShadowAnswers, ShadowRunner
from headrace_registry.storage import store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.records import ModelRecord, VersionRecord
from headrace_registry.storage.tables import STREAM
from headrace_registry.versions.registration import CheckpointHandler
from headrace_registry.versions.transition import Transition
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record
from headrace_runtime.settings.sections import BusSettings, Common, DatabaseSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.processor import Handler, Processor, ProcessorLimits
from headrace_schemas import EVENTS, Checkpoint, DeadLetter, Event, LoadedVersion, ModelEvent, Probe, Replica, Routing
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.programs import Tasks
from headrace_schemas.values.blobs import BlobRef, Manifest
from tests.support import tiny_model
from tests.support.remembered import make_tables
from tests.support.streams import producer_of

E = TypeVar("E", bound=Event)
START = datetime(2026, 1, 1, tzinfo=UTC)
MODEL = "m"
WAIT_S = 60.0
"""Limit of each wait, for a busy machine; usually milliseconds."""
EQUAL = {"t1": 0.5, "t2": 0.5, "a1": 0.5, "a2": 0.5}


class FakeClock:
    """Clock that stands still until a test advances it. `sleep` yields and does not wait."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed_s)

    def monotonic_s(self) -> float:
        return self.elapsed_s

    async def sleep(self, seconds: float) -> None:
        self.elapsed_s += seconds
        await asyncio.sleep(0)


class FakeBus(EventProducer):
    """Bus that stores all records. While `away` is set, it refuses them."""

    def __init__(self, blobs: BlobStore) -> None:
        super().__init__(BusSettings(), "headrace/registry", blobs)
        self.events: list[Event] = []
        self.away = False

    async def send_raw(self, records: Iterable[Outgoing]) -> None:
        if self.away:
            raise Unavailable("the bus is away")
        for record in records:
            assert record.value is not None
            self.events.append(EVENTS[record.topic].from_json(record.value))


class FakeGate:
    """Gate with configured scores by version and task, `EQUAL` by default.

    A configured exception is raised instead of a score. Plays wait while `open` is not set.
    """

    def __init__(self) -> None:
        self.configured = True
        self.sha256 = "gate"
        self.scores: dict[str, dict[str, float] | GateFailed] = {}
        self.runs: list[set[str]] = []
        """The versions that played, for each start of the program."""
        self.requests: list[tuple[str, str, int]] = []
        """Every play: version, task, seed."""
        self.cancelled: list[set[str]] = []
        self.prepared: list[int] = []
        """Number of runs that had begun, for each time that a copy of the program was to be started ahead."""
        self.open = asyncio.Event()
        self.open.set()

    @property
    def players(self) -> set[str]:
        return set().union(*self.runs)

    @contextlib.asynccontextmanager
    async def session(self, *, use_spare: bool = False) -> AsyncIterator[FakeSession]:
        del use_spare
        session = FakeSession(self)
        self.runs.append(session.players)
        try:
            yield session
        except asyncio.CancelledError:
            self.cancelled.append(session.players)
            raise

    def prepare(self) -> None:
        """Record the call. The start of a session takes no time."""
        self.prepared.append(len(self.runs))


class FakeSession:
    """Gate session that returns the scores of its `FakeGate`."""

    tasks = Tasks(gate=("t1", "t2"), audit=("a1", "a2"))

    def __init__(self, gate: FakeGate) -> None:
        self._gate = gate
        self.players: set[str] = set()

    async def play(self, version: str, task: str, seed: int) -> float:
        self.players.add(version)
        self._gate.requests.append((version, task, seed))
        await self._gate.open.wait()
        score = self._gate.scores.get(version, EQUAL)
        if isinstance(score, GateFailed):
            raise score
        return score.get(task, EQUAL[task])


class Rig:
    """Registry under test.

    Call `start`, publish checkpoints, change replicas and tick the controller; then look at `events`.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str = "sqlite",
        settings: RegistrySettings | None = None,
        answers: ShadowAnswers | None = None,
    ) -> None:
        common = Common(data_dir=folder, database=DatabaseSettings(url=SecretStr(database_url)))
        self.clock = FakeClock()
        self.blobs = BlobStore.open(common)
        self.database = Database.open("registry", common)
        self.bus = FakeBus(self.blobs)
        self.gate = FakeGate()
        gate = GateSettings(margin=0.25, anchor_margin=0.125, tasks_max=400, audit_tasks=4, attempts=2)
        self.settings = settings or RegistrySettings(gate=gate, poll_s=0.01)
        self.replicas: dict[str, Replica] = {}
        self._offset = 0
        self.answers = answers
        """Source of a shadow's answers."""
        self.reports: ReportWriter | None = None
        self.watching = True
        """Whether live traffic is being read, so that a rollout may begin."""
        self._director: ModelController | None = None
        self.boot()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.database.close()

    def boot(self) -> None:
        """Replace the process by a new one on the same database: memory is lost, and gate runs end with the process."""
        for run in self._director._runner._runs.values() if self._director else ():
            run.task.cancel()
        for task in self.shadow_running():
            task.cancel()
        self.lease = LeaderLease(self.database, self.clock, self.settings.lease_s)
        sampler = PromptSampler(self.lease, self.settings.rollout)
        turns = TurnHandler(self.lease, EVENTS_PER_UNIT_MAX, sampler)
        handlers: dict[str, Handler] = {
            Checkpoint.topic: CheckpointHandler(self.blobs, self.lease),
            **traffic_handlers(turns, self.lease, self.settings),
        }
        self.processor = Processor(
            service="registry",
            handlers=handlers,
            after_batch=turns.write_counts,
            database=self.database,
            tables=STREAM,
            outbox=Outbox(self.database, STREAM, self.bus, self.clock),
            blobs=self.blobs,
            clock=self.clock,
            limits=ProcessorLimits(retry_s=1.0),
        )
        self._director = ModelController(
            self.processor,
            self.lease,
            self.gate,
            self.settings,
            self.replicas.values,
            lambda _enabled: self.watching,
            self.reports,
            self.answers,
        )

    def shadow_running(self) -> list[asyncio.Task[None]]:
        """Return the tasks of shadow prompts that are being answered."""
        shadow = self._director._shadow if self._director else None
        return list(shadow._running.values()) if isinstance(shadow, ShadowRunner) else []

    async def answered(self) -> None:
        """Wait until no shadow prompt is being answered."""
        while running := self.shadow_running():
            await asyncio.gather(*running, return_exceptions=True)
            await self.model_controller.tick()

    @property
    def model_controller(self) -> ModelController:
        assert self._director is not None
        return self._director

    async def start(self) -> None:
        await make_tables(self.database, "headrace_registry")
        await self.lease.acquire()
        await self.processor.recover()

    # checkpoints

    def manifest(
        self, step: int, *, tokenizer: str = "a", base: str | None = None, parent: str | None = None
    ) -> tuple[Manifest, BlobRef]:
        content = f"weights {step}"
        return tiny_model.version(self.blobs, MODEL, content, step=step, parent=parent, base=base, tokenizer=tokenizer)

    async def checkpoint(
        self, step: int, *, tokenizer: str = "a", base: str | None = None, parent: str | None = None
    ) -> str:
        """Publish a checkpoint and return its version."""
        manifest, ref = self.manifest(step, tokenizer=tokenizer, base=base, parent=parent)
        await self.receive(tiny_model.checkpoint(manifest, ref, self.clock.now()).to_json())
        return manifest.version

    async def receive(self, value: bytes) -> None:
        record = Record(Checkpoint.topic, 0, self._offset, MODEL.encode(), value)
        self._offset += 1
        await self.processor.process([record])

    async def process_events(self, *events: Event, producer: str | None = None) -> None:
        """Process `events` as live traffic. `producer` is their producer, by default the service that publishes such
        events."""
        records = []
        for event in events:
            headers = Envelope.of(event, producer or producer_of(event)).headers()
            records.append(Record(event.topic, 0, self._offset, event.key.encode(), event.to_json(), headers))
            self._offset += 1
        await self.processor.process(records)

    # replicas

    def heartbeat(self, replica_id: str = "r1", **versions: str) -> None:
        """Receive a heartbeat of a replica. `versions` maps versions to load states; ready versions passed their
        probe."""
        self.report(replica_id, *(loaded(name, state) for name, state in versions.items()))

    def report(self, replica_id: str, *versions: LoadedVersion, stopping: bool = False) -> None:
        self.replicas[replica_id] = Replica(
            time=self.clock.now(),
            replica_id=replica_id,
            url="http://x",
            engine="fake",
            versions=versions,
            capacity=1,
            ttl_s=10,
            started_at=START,
            stopping=stopping,
        )

    def follow(self, *replica_ids: str) -> None:
        """Let the replicas load the versions of the last routing."""
        routings = self.sent(Routing)
        serve = routings[-1].serve if routings else ()
        for replica_id in replica_ids or ("r1",):
            self.report(replica_id, *(loaded(served.version) for served in serve))

    # running

    async def ticks(self, count: int = 3) -> None:
        for _ in range(count):
            await self.model_controller.tick()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the model controller inside the context, with replicas that follow the routing."""
        task = asyncio.create_task(self.model_controller.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition: Callable[[], bool], *, follow: bool = True) -> None:
        """Wait for `condition`. Meanwhile, the replicas follow the routing if `follow` is set."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.decided()
            if follow:
                self.follow()
            await asyncio.sleep(0.005)

    async def promote_in_turn(self, *steps: int) -> list[str]:
        """Promote the versions of `steps` in order with equal scores, so that the last one is the champion. Return
        them."""
        versions = []
        async with self.running():
            for step in steps:
                version = await self.checkpoint(step)
                await self.until(lambda version=version: ("evaluated", version) in self.decided())  # type: ignore[misc]
                await self.until(lambda version=version: ("promoted", version) in self.decided())  # type: ignore[misc]
                versions.append(version)
        return versions

    # looking

    def sent(self, kind: type[E]) -> list[E]:
        """Return the events of class `kind` without duplicates, as a consumer sees them."""
        return list({event.event_id: event for event in self.bus.events if isinstance(event, kind)}.values())

    def decided(self) -> list[tuple[str, str]]:
        return [(event.decision, event.version) for event in self.sent(ModelEvent)]

    def last(self, decision: str) -> ModelEvent:
        return [event for event in self.sent(ModelEvent) if event.decision == decision][-1]

    @property
    def routing(self) -> Routing:
        return self.sent(Routing)[-1]

    @property
    def dead_letters(self) -> list[DeadLetter]:
        return self.sent(DeadLetter)

    async def state(self, version: str) -> str:
        return (await self.record(version)).state

    async def model(self) -> ModelRecord:
        async with self.database.transaction() as tx:
            return await self.model_in(tx)

    async def model_in(self, tx: AsyncConnection) -> ModelRecord:
        model = await store.load_model(tx, MODEL)
        assert model is not None
        return model

    async def change(self, change: Callable[[Transition, ModelRecord], Awaitable[None]]) -> None:
        """Apply an operator's change as the REST interface does."""

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self.lease.check(tx)
            transition = Transition(tx, now)
            await change(transition, await self.model_in(tx))
            return await transition.finish()

        await self.processor.step(work)

    async def record(self, version: str) -> VersionRecord:
        async with self.database.transaction() as tx:
            record = await store.load_version(tx, version)
        assert record is not None
        return record


def loaded(version: str, state: str = "ready", *, passed: bool = True, error: str | None = None) -> LoadedVersion:
    probe = Probe(max_abs_delta=0.001, parent_max_abs_delta=0.5, passed=passed) if state == "ready" else None
    return LoadedVersion.model_validate({"version": version, "state": state, "error": error, "probe": probe})
