"""Composition root of collector, scorer and judge: database, outbox, Faust, timers and health."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from starlette.routing import BaseRoute

from headrace_runtime.clock import SystemClock
from headrace_runtime.http import web
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.metrics import STEPS_FAILED
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common, ServiceSettings
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database, migrate
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.faust_host import FaustHost
from headrace_runtime.stream.pausing import resume_route
from headrace_runtime.stream.processor import Handler, Processor, ProcessorLimits, Step, StepFailed, run_until_finished
from headrace_runtime.stream.steps import DEFAULT_LIMITS

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Timer:
    """A step that runs `interval_s` after its last run has ended, and immediately again while it is `Unfinished`."""

    interval_s: float
    step: Step


@dataclass(frozen=True, slots=True)
class StreamService:
    """Definition of one stream service: its tables, handlers of topics, timers and routes. `run` runs it."""

    name: str
    package: str
    """The package that contains the folder `migrations`."""
    tables: StreamTables
    handlers: Mapping[str, Handler]
    """Handler by topic. The service consumes these topics."""
    ends_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    after_batch: Step | None = None
    timers: Sequence[Timer] = ()
    workers: Callable[[Processor], Sequence[Awaitable[None]]] = lambda _processor: ()
    """Further tasks of the service, for example workers on jobs. They must commit through `processor.step`."""
    routes: Callable[[Processor], Sequence[BaseRoute]] = lambda _processor: ()
    limits: ProcessorLimits = DEFAULT_LIMITS


async def run(service: StreamService, common: Common, settings: ServiceSettings) -> None:
    """Run the service until cancelled. If one task fails, all end, and the exception means that a restart is needed."""
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
