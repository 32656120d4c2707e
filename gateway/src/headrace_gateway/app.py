"""Composition root of the gateway: its objects, the tasks that run next to its HTTP server, and the order of their
shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from starlette.types import ASGIApp

from headrace_gateway import metrics
from headrace_gateway.access.keys import KeyRing, read_keys, share_of_tenant
from headrace_gateway.access.limits import RequestLimits, limit_to_descriptors
from headrace_gateway.apis.admission import Admission
from headrace_gateway.apis.responses_api.recalled import recall_turns
from headrace_gateway.capture.captured_turns import CapturedTurns
from headrace_gateway.capture.publisher import Publisher
from headrace_gateway.capture.spool import Spool
from headrace_gateway.http import Parts, application
from headrace_gateway.requests.feedback import LogEnds
from headrace_gateway.requests.response_store import ResponseStore
from headrace_gateway.routing.engine import Engines
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_gateway.routing.replica_set import ReplicaSet, ReplicaWatch
from headrace_gateway.routing.table_cache import TableCache
from headrace_gateway.settings import GatewaySettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.http import web
from headrace_runtime.http.guard import ReplicaTrust
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import Offsets, TopicTable
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.known_versions import KnownVersions
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common, SecuritySettings
from headrace_runtime.settings.source_values import SourceValues
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.disk import DiskGuard, NameFile
from headrace_schemas import Replica, Routing
from headrace_schemas.rules.ingest import KnownModels

SOURCE = "headrace/gateway"
_SPOOL_SHARE = 0.5
"""Part of `disk_free_bytes_min` that the spool never uses. The bus then refuses records for lack of space first, and
the spool can still store them."""
log = get_logger(__name__)


async def run(common: Common, settings: GatewaySettings) -> None:
    """Serve requests until cancelled. On shutdown, open requests are completed first, and events that were not sent to
    the bus stay in the spool."""
    logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
    keys = read_keys(settings)
    values = common.section_of("scorer", SourceValues)
    ring = KeyRing(keys, settings.limits_per_key, common.security.internal_key.get_secret_value())
    blobs = BlobStore.open(common)
    clock = SystemClock()
    limits = RequestLimits(
        limit_to_descriptors(settings.limits_total),
        clock,
        tenant_share=share_of_tenant(settings, keys),
        bytes_per_hour=settings.capture.tenant_bytes_per_hour,
    )
    metrics.IN_PROGRESS.set_function(lambda: limits.in_progress)
    async with (
        Spool(
            spool_folder(common, settings),
            settings.capture.spool_bytes_max,
            settings.capture.spool_reserve_bytes,
            DiskGuard(spool_folder(common, settings), common.disk_free_bytes_min, share=_SPOOL_SHARE),
        ) as spool,
        Engines(settings.upstream, common.security.internal_key.get_secret_value()) as engines,
        asyncio.TaskGroup() as group,
    ):
        publisher = Publisher(
            lambda: EventProducer(common.bus, SOURCE, blobs),
            spool,
            settings.capture,
            send_timeout_s=common.bus.request_timeout_s,
            prepare=lambda: topics.ensure(common.bus),
            log_ends=lambda: LogEnds(Offsets(common.bus, None, f"{SOURCE}-offsets")),
            tenants=len({key.tenant for key in keys}),
        )

        sent_letters = NameFile(common.data_dir / "gateway" / "refused")

        async def refuse(record: Record, error: InvalidEvent) -> None:
            letter = dead_letter("gateway", record, error.reason, str(error))
            if letter.event_id not in sent_letters:
                await publisher.publish(letter)
                sent_letters.add(letter.event_id)

        def routed(key: str, row: Routing | None) -> None:
            catalog.update(key, row)

        def replica_changed(key: str, row: Replica | None) -> None:
            replica_set.update(key, row)

        routing = TopicTable(Routing, common.bus, SOURCE, blobs, refuse, routed)
        trust = ReplicaTrust(common.security)
        replicas = TopicTable(Replica, common.bus, SOURCE, blobs, refuse, replica_changed, trust.accepts)
        known_folder, late_s = local_copies_folder(common, settings), settings.capture.bus_wait_s
        routing_cache = TableCache(Routing, known_folder / "routing", routing, routed, late_s)
        replica_cache = TableCache(Replica, known_folder / "replicas", replicas, replica_changed, late_s, trust.accepts)
        catalog = ModelCatalog(
            settings.model_aliases,
            lambda: routing.loaded.is_set() or routing_cache.used,
            lambda: replica_set.changed(),
            any_name=settings.answers_to_any_name,
        )
        replica_set = ReplicaSet(clock, replicas.loaded.is_set)
        versions = KnownVersions(common.bus, SOURCE, blobs, refuse)

        async def known_models(model: str) -> KnownModels:
            try:
                return await versions.models(model)
            except Unavailable:  # the scorer repeats the check
                return KnownModels()

        captured = CapturedTurns(settings.capture.references_bytes_max, recalls=True)
        forgotten = known_folder / "forgotten-responses"
        responses = ResponseStore(settings.responses_bytes_max, clock, recalls=True, forgotten=forgotten)
        watch = ReplicaWatch(replica_set, engines, settings.upstream, clock)
        work = (
            publisher.run(),
            routing.run(),
            routing_cache.run(),
            replicas.run(),
            replica_cache.run(),
            versions.run(),
            watch.run(),
            recall_turns(common.bus, blobs, captured, responses, f"{SOURCE}-turns"),
        )
        beside = [group.create_task(coroutine) for coroutine in work]
        admission = Admission(ring, limits, publisher)
        known = (known_models, versions.signals_of, values)
        parts = Parts(settings, admission, catalog, replica_set, engines, clock, common, *known, captured, responses)
        app = application(parts)
        try:
            async with (
                web.serve(app, settings, common.security) as port,
                serve_trinity_port(app, settings, common.security) as trinity_port,
            ):
                log.info("listening", host=settings.host, port=port, trinity_port=trinity_port, keys=len(keys))
                await asyncio.Event().wait()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)


def serve_trinity_port(
    app: ASGIApp, settings: GatewaySettings, security: SecuritySettings | None = None
) -> AbstractAsyncContextManager[int]:
    """Serve the same application at a second port, `gateway.trinity_port`, if that is set. The context yields the port,
    or 0.

    Open this port after the main port, because a socket inherited from the supervisor belongs to the main port.
    """
    if not settings.trinity_port:
        return contextlib.nullcontext(0)
    return web.serve(app, settings.model_copy(update={"port": settings.trinity_port}), security)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's warnings about upgrades that it does not support.

    The HTTP client of the JDK sends `Upgrade: h2c` with every request, so each would log such a warning.
    """
    return "upgrade request" not in record.msg and "WebSocket library" not in record.msg


def spool_folder(common: Common, settings: GatewaySettings) -> Path:
    return Path(settings.capture.spool_dir or common.data_dir / "gateway" / "spool")


def local_copies_folder(common: Common, settings: GatewaySettings) -> Path:
    """Return the folder for copies of the topics `routing` and `replicas`, and for the ids of deleted responses.

    The folder is a sibling of the spool and, like the spool, belongs to one process.
    """
    spool = spool_folder(common, settings)
    return spool.with_name(f"{spool.name}-known")
