"""Composition root of the stream services (collector, scorer, judge): database, outbox, timers, health, and Faust,
which feeds the `Processor` with records.

Faust delivers raw bytes, and offsets are committed only after the effect is durable. Its own decoding, batching
(`take`) and tables are not used: Faust skips records that it cannot decode, `take` acknowledges a batch whose handler
raised, and its tables are not part of the service's transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import faust
from starlette.routing import BaseRoute

import headrace_runtime.kafka.damage  # noqa: F401 (a damaged batch must not stop aiokafka, which Faust uses)
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Unavailable
from headrace_runtime.http import web
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.topics import client_options
from headrace_runtime.kafka.wire import Record
from headrace_runtime.metrics import QUEUE_LENGTH, STEPS_FAILED
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings, Common, ServiceSettings
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database, migrate
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.pausing import resume_route
from headrace_runtime.stream.processor import Handler, Processor, ProcessorLimits, Step, StepFailed, run_until_finished
from headrace_runtime.stream.steps import DEFAULT_LIMITS

_PRUNE_INTERVAL_S = 60.0


class FaustHost:
    """Faust application that feeds one processor, with one consumer group and one agent for all topics. Batches are
    processed one after the other.

    `folder` is a working folder that Faust requires and leaves empty. By default Faust would create it in the working
    directory.
    """

    def __init__(
        self,
        processor: Processor,
        topics: tuple[str, ...],
        bus: BusSettings,
        *,
        group: str,
        folder: Path,
        batch_max: int = 200,
    ) -> None:
        self._processor = processor
        self._topics = topics
        self._bus = bus
        self._batch_max = batch_max
        self._queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=batch_max * 2)
        self._app = _app(group, bus, folder)
        self._offsets = Offsets(bus, group)
        self.assigned = asyncio.Event()
        """Set while the group has assigned partitions, so that the service is ready."""

    async def run(self) -> None:
        """Consume records until cancelled. Raises if the processor fails; in this case the process must be restarted.

        A restart loses no records: unacknowledged records are delivered again, and handled ones are deduplicated.
        """
        self._declare()
        try:
            await self._offsets.start()
            self._processor.ends = self._offsets.ends
            starts = await self._offsets.starts(self._topics)
            await disk.retry_while_full(lambda: self._processor.recover(starts))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._work())
                group.create_task(self._prune())
                group.create_task(self._watch())
                await self._app.start()
        finally:
            await self._app.stop()
            await self._offsets.stop()

    def _declare(self) -> None:
        channel = self._app.topic(
            *self._topics, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
        )

        async def receive(stream: Any) -> None:
            async for event in stream.noack().events():
                await self._queue.put(event)
                QUEUE_LENGTH.set(self._queue.qsize())

        async def assigned(*_: object, **__: object) -> None:
            self.assigned.set()

        async def revoked(*_: object, **__: object) -> None:
            self.assigned.clear()

        self._app.agent(channel, name=f"{self._app.conf.id}-agent")(receive)
        self._app.on_partitions_assigned.connect(assigned, weak=False)
        self._app.on_partitions_revoked.connect(revoked, weak=False)

    async def _work(self) -> None:
        async for events in self._batches():
            await self._processor.process([_record(event) for event in events])
            for event in events:
                event.ack()

    async def _batches(self) -> AsyncIterator[list[Any]]:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._batch_max and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            QUEUE_LENGTH.set(self._queue.qsize())
            yield batch

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_INTERVAL_S)
            try:
                await self._processor.prune()
            except (Unavailable, StepFailed) as error:
                log.warning("prune_postponed", error=str(error))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if self._app.crashed or self._app.should_stop:
                raise Unavailable(f"Faust stopped: {self._app.crash_reason!r}")


def _app(group: str, bus: BusSettings, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return faust.App(
        group,
        datadir=folder,
        broker=[f"kafka://{address}" for address in bus.address.split(",")],
        broker_credentials=_credentials(bus),
        store="memory://",
        web_enabled=False,
        autodiscover=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=bus.session_timeout_s,
        broker_heartbeat_interval=1.0,
        broker_commit_interval=1.0,
        # The bus answers a join when all other members have joined, or when the session of a dead member has expired.
        broker_request_timeout=max(bus.request_timeout_s, bus.session_timeout_s),
        stream_wait_empty=False,
        loghandlers=[],
        logging_config={"version": 1, "disable_existing_loggers": False, "incremental": True},
    )


def _credentials(bus: BusSettings) -> Any:
    """Return the login at the bus as Faust's settings require it, or None without a login."""
    options = client_options(bus)
    context = options.get("ssl_context")
    if "sasl_mechanism" not in options:
        return None if context is None else faust.SSLCredentials(context)
    return faust.SASLCredentials(
        username=options["sasl_plain_username"],
        password=options["sasl_plain_password"],
        mechanism=options["sasl_mechanism"],
        ssl_context=context,
    )


def _record(event: Any) -> Record:
    message = event.message
    headers = message.headers.items() if isinstance(message.headers, Mapping) else message.headers or ()
    at_ms = message.timestamp_ms if hasattr(message, "timestamp_ms") else int(message.timestamp * 1000)
    return Record(message.topic, message.partition, message.offset, message.key, message.value, tuple(headers), at_ms)


log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Timer:
    """Step that runs again `interval_s` after its last run has ended, or at once if the last run returned
    `Unfinished`."""

    interval_s: float
    step: Step


@dataclass(frozen=True, slots=True)
class StreamService:
    """Definition of one stream service: its tables, the handlers of its topics, timers and routes. The function `run`
    runs it."""

    name: str
    package: str
    """The package that contains the folder `migrations`."""
    tables: StreamTables
    handlers: Mapping[str, Handler]
    """Handler of each topic. The service consumes these topics."""
    ends_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    after_batch: Step | None = None
    timers: Sequence[Timer] = ()
    workers: Callable[[Processor], Sequence[Awaitable[None]]] = lambda _processor: ()
    """Function that returns further tasks, for example workers on jobs. They must make their changes through
    `processor.step`."""
    routes: Callable[[Processor], Sequence[BaseRoute]] = lambda _processor: ()
    limits: ProcessorLimits = DEFAULT_LIMITS


async def run(service: StreamService, common: Common, settings: ServiceSettings) -> None:
    """Run the service until cancelled. If one of its tasks fails, all are cancelled, and the process must be
    restarted."""
    blobs = BlobStore.open(common)
    database = Database.open(service.name, common)
    producer = EventProducer(common.bus, f"headrace/{service.name}", blobs)
    try:
        await topics.ensure(common.bus)
        await disk.retry_while_full(lambda: migrate(database, service.package))
        await producer.start()
        clock = SystemClock()
        processor = Processor(
            service=service.name,
            handlers=service.handlers,
            database=database,
            tables=service.tables,
            outbox=Outbox(database, service.tables, producer, clock),
            blobs=blobs,
            clock=clock,
            limits=replace(service.limits, refusals=common.dead_letters.bounds),
            ends_of=service.ends_of,
            after_batch=service.after_batch,
            disk=disk.DiskGuard(common.data_dir, common.disk_free_bytes_min) if database.sqlite else None,
        )
        group_id, folder = f"headrace-{service.name}", common.data_dir / "faust"
        host = FaustHost(processor, tuple(service.handlers), common.bus, group=group_id, folder=folder)
        checks: dict[str, web.Check] = {
            "bus": host.assigned.is_set,
            "database": database.ready,
            "consumer": lambda: processor.paused is None,
        }
        routes = [*service.routes(processor), resume_route(processor, common)]
        async with web.serve(web.app(checks, routes, common), settings, common.security) as port:
            log.info("listening", port=port)
            async with asyncio.TaskGroup() as group:
                group.create_task(host.run())
                for timer in service.timers:
                    group.create_task(_repeat(processor, timer))
                for worker in service.workers(processor):
                    group.create_task(_as_coroutine(worker))
    finally:
        await producer.stop()
        await database.close()


async def _repeat(processor: Processor, timer: Timer) -> None:
    while True:
        await asyncio.sleep(timer.interval_s)
        try:
            await run_until_finished(processor.clock, lambda: processor.step(timer.step))
        except StepFailed as error:
            STEPS_FAILED.labels(processor.service).inc()
            log.exception("step_failed", error=str(error))


async def _as_coroutine(work: Awaitable[None]) -> None:
    await work
