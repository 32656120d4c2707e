"""Composition root of the registry: database, leader lease, bus, controllers and REST interface."""

from __future__ import annotations

import asyncio
import contextlib

from headrace_registry.control.model_controller import ModelController
from headrace_registry.control.rollout_reports import ReportWriter
from headrace_registry.control.traffic import SessionEventHandler, TrafficReader, TurnHandler
from headrace_registry.garbage.collector import GarbageCollector
from headrace_registry.gate.gate import Gate
from headrace_registry.pages.catalog_api import CatalogApi
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.registry_api import RegistryApi
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_registry.rollouts.settings import EVENTS_PER_UNIT_MAX
from headrace_registry.settings import RegistrySettings
from headrace_registry.shadow.gateway_client import GatewayAnswers
from headrace_registry.shadow.runner import PromptSampler
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.tables import STREAM
from headrace_registry.versions.registration import CheckpointHandler, CheckpointReader
from headrace_registry.versions.routing import Reconciler
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused, Unavailable
from headrace_runtime.http import web
from headrace_runtime.http.guard import ReplicaTrust
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.dead_letters import DeadLetterSender
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database, migrate
from headrace_runtime.storage.isolation import ItemIsolation
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.processor import Handler, Processor, ProcessorLimits
from headrace_schemas import Checkpoint, Feedback, Replica, Reward, Routing, Trajectory, Turn

_REPORTS_KEPT_MAX = 200
"""Maximum number of charts under `registry/rollouts` of the data directory. Each step of a rollout adds one, and the
oldest are deleted. Charts need matplotlib."""

log = get_logger(__name__)
_PRUNE_INTERVAL_S = 60.0
_STORAGE_LIMIT_INTERVAL_S = 5.0
"""Seconds between two checks without a new version: a decision may end the need of one."""


async def run(common: Common, settings: RegistrySettings) -> None:
    """Run the registry until cancelled. A standby only answers read requests; the leader makes all decisions."""
    blobs = BlobStore.open(common)
    database = Database.open("registry", common)
    producer = EventProducer(common.bus, "headrace/registry", blobs)
    try:
        await topics.ensure(common.bus)
        await disk.retry_while_full(lambda: migrate(database, "headrace_registry"))
        await producer.start()
        await _Registry(common, settings, blobs, database, producer).run()
    finally:
        await producer.stop()
        await database.close()


class _Registry:
    def __init__(
        self, common: Common, settings: RegistrySettings, blobs: BlobStore, database: Database, producer: EventProducer
    ) -> None:
        clock = SystemClock()
        refuse = DeadLetterSender("registry", producer, common.data_dir / "registry")
        self._common = common
        self._settings = settings
        self._database = database
        self._isolated = ItemIsolation("registry")
        self._lease = LeaderLease(database, clock, settings.lease_s)
        accepts = ReplicaTrust(common.security).accepts
        client_id = "headrace-registry-replicas"
        self._replicas = TopicTable(Replica, common.bus, client_id, blobs, refuse, self._replica_changed, accepts)
        self._routings = TopicTable(Routing, common.bus, "headrace-registry-routing", blobs, refuse)
        self._versions_seen: dict[str, object] = {}
        self._storage_changed = asyncio.Event()
        sampler = PromptSampler(self._lease, settings.rollout)
        turns = TurnHandler(self._lease, EVENTS_PER_UNIT_MAX, sampler)
        self._processor = Processor(
            service="registry",
            handlers={
                Checkpoint.topic: CheckpointHandler(blobs, self._lease),
                **traffic_handlers(turns, self._lease, settings),
            },
            after_batch=turns.write_counts,
            database=database,
            tables=STREAM,
            outbox=Outbox(database, STREAM, producer, clock),
            blobs=blobs,
            clock=clock,
            limits=ProcessorLimits(retry_s=settings.retry_s, refusals=common.dead_letters.bounds),
        )
        self._reader = CheckpointReader(self._processor, database, common.bus, self._registered)
        self._traffic_reader = TrafficReader(self._processor, self._lease, common.bus, self._wake)
        answers = None
        if settings.rollout.shadow.tenants:
            key = common.security.internal_key.get_secret_value()
            shadow = settings.rollout.shadow
            answers = GatewayAnswers(settings.gate.base_url, shadow, key, self._replicas.rows.values, clock)
        reports = ReportWriter(common.data_dir / "registry" / "rollouts", _REPORTS_KEPT_MAX)
        self._model_controller = ModelController(
            self._processor,
            self._lease,
            Gate(settings.gate),
            settings,
            self._replicas.rows.values,
            self._follow_traffic,
            reports,
            answers,
        )
        self._reconciler = Reconciler(self._processor, self._lease, self._routings.rows, clock)
        garbage = GarbageCollector(
            blobs, self._processor, self._lease, settings.retired_for_s, settings.versions_bytes_max
        )
        self._garbage = garbage
        changes = RegistryChanges(self._processor, self._lease, self._model_controller.wake.set)
        self._api = RegistryApi(common, database, clock, self._replicas.rows.values, changes)
        self._rollouts = RolloutApi(common, settings.rollout, database, changes)
        self._catalog = CatalogApi(common, settings, blobs, database, changes, garbage)

    async def run(self) -> None:
        checks: dict[str, web.Check] = {
            "database": self._database.ready,
            "bus": self._is_connected,
            "consumer": self._is_consuming,
        }
        pages = [*self._api.routes(), *self._catalog.routes(), *self._rollouts.routes()]
        async with web.serve(web.app(checks, pages, self._common), self._settings, self._common.security) as port:
            log.info("listening", port=port)
            try:
                await disk.retry_while_full(self._lease.acquire)
                await self._run_as_leader()
            finally:
                await self._lease.release()

    async def _run_as_leader(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lease.keep())
            group.create_task(self._replicas.run())
            group.create_task(self._routings.run())
            await asyncio.gather(self._replicas.loaded.wait(), self._routings.loaded.wait())
            await disk.retry_while_full(self._processor.recover)
            group.create_task(self._reader.run())
            group.create_task(self._traffic_reader.run())
            group.create_task(self._model_controller.run())
            group.create_task(self._reconcile())
            group.create_task(self._prune())
            group.create_task(self._keep_storage_limit())

    def _wake(self) -> None:
        self._model_controller.wake.set()

    def _registered(self) -> None:
        self._storage_changed.set()
        self._wake()

    def _follow_traffic(self, enabled: bool) -> bool:
        if enabled:
            self._traffic_reader.enabled.set()
        else:
            self._traffic_reader.enabled.clear()
        return self._traffic_reader.following.is_set()

    def _is_consuming(self) -> bool:
        return self._processor.paused is None

    def _is_connected(self) -> bool:
        """Return whether the checkpoint reader is connected. A standby reads no topic, so it always counts as
        connected."""
        return self._reader.following.is_set() or not self._lease.acquired.is_set()

    def _replica_changed(self, key: str, replica: Replica | None) -> None:
        seen = replica and (replica.versions, replica.stopping)
        if self._versions_seen.get(key) != seen:
            self._versions_seen[key] = seen
            self._model_controller.wake.set()

    async def _reconcile(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            await self._isolated.run("reconcile", self._reconciler.tick, None)

    async def _keep_storage_limit(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._storage_changed.wait(), _STORAGE_LIMIT_INTERVAL_S)
            self._storage_changed.clear()
            await self._isolated.run("storage limit", self._keep_limit, None)

    async def _keep_limit(self) -> None:
        try:
            await disk.retry_while_full(self._garbage.keep_limit)
        except (Refused, Unavailable, CorruptBlob, MissingBlob) as error:  # the next round tries again
            log.warning("versions_not_bounded", error=str(error))

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_INTERVAL_S)
            await self._isolated.run("prune", lambda: disk.retry_while_full(self._processor.prune), None)


def traffic_handlers(turns: TurnHandler, lease: LeaderLease, settings: RegistrySettings) -> dict[str, Handler]:
    """Return the stream handlers for turns, trajectories, rewards and feedback. These topics are read only while a
    rollout is in progress."""
    session_events = SessionEventHandler(lease, EVENTS_PER_UNIT_MAX)
    return {
        Turn.topic: turns,
        Reward.topic: session_events,
        Feedback.topic: session_events,
        Trajectory.topic: session_events,
    }
