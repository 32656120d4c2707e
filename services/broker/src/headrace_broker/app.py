"""Composition root of the broker. It opens the file, serves the Kafka port, and only then imports HTTP and metrics,
which takes longer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from importlib import import_module

from headrace_broker import batch
from headrace_broker.batch import parse_produced
from headrace_broker.broker import Broker, Credentials, MemoryBudget
from headrace_broker.cleanup import Upkeep
from headrace_broker.coordinator import TICK_S, Coordinator
from headrace_broker.errors import Damaged, Rejected
from headrace_broker.inspection import LostRange
from headrace_broker.log import Log
from headrace_broker.maintenance import Maintenance
from headrace_broker.reads import Readers
from headrace_broker.server import Server, listening_socket
from headrace_broker.settings import KAFKA_HOST, BrokerSettings
from headrace_broker.stats import Stats
from headrace_broker.store import Store
from headrace_broker.topics import CommittedOffsets, TopicCatalog, TopicStore
from headrace_broker.transactions import Transactions
from headrace_broker.writer import Writer
from headrace_runtime.clock import Clock, SystemClock
from headrace_runtime.errors import SettingError
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import disk

PARTITIONS_MAX = 4_000
"""Maximum number of partitions of all topics together."""
_FETCHES_BYTES_MAX = 128 * 1024 * 1024
"""Maximum bytes of all Fetch responses in progress. Further Fetch requests wait."""
_READER_THREADS = 2
"""Number of threads that read the file."""

log = get_logger(__name__)
_TRY_INTERVAL_S = 1.0
_NO_LOGIN = Credentials()
_SHARE_OF_TABLES = 0.5
"""Part of `disk_free_bytes_min` below which records of compacted topics are refused, too. Other records are refused
below all of it."""


async def run(common: Common, settings: BrokerSettings) -> None:
    """Serve Kafka clients until cancelled. Raises an exception if the process must be restarted."""
    folder = common.data_dir.absolute() / "broker"

    async def open_store() -> Store:
        return Store(folder, fsync=settings.fsync, file_bytes_max=settings.file_bytes_max)

    store = await disk.retry_while_full(open_store)
    try:
        credentials = Credentials(common.bus.username, common.bus.password.get_secret_value())
        free_min = common.disk_free_bytes_min
        guards = disk.DiskGuard(folder, free_min), disk.DiskGuard(folder, free_min, share=_SHARE_OF_TABLES)
        async with serve_broker(store, settings, SystemClock(), credentials, guards) as (broker, server):
            log.info("listening", kafka=f"{KAFKA_HOST}:{broker.port}", file=str(store.path))
            async with asyncio.TaskGroup() as group:
                group.create_task(_wait_for_failure(broker.writer.failed, store))
                group.create_task(_wait_for_failure(broker.readers.failed, store))
                group.create_task(_tick(broker))
                group.create_task(_retry_commits(broker))
                group.create_task(_maintain(store, broker))
                group.create_task(_serve_http(common, broker, server))
    finally:
        store.close()


@contextlib.asynccontextmanager
async def serve_broker(
    store: Store,
    settings: BrokerSettings,
    clock: Clock,
    credentials: Credentials = _NO_LOGIN,
    guards: tuple[disk.DiskGuard | None, disk.DiskGuard | None] = (None, None),
) -> AsyncIterator[tuple[Broker, Server]]:
    """Serve the Kafka port inside the context, and yield the broker and its server. On exit, all submitted operations
    are committed."""
    try:
        listener = listening_socket(KAFKA_HOST, settings.kafka_port)
    except OSError as error:
        remedy = f"cannot listen on {KAFKA_HOST}: {error.strerror}; is another broker or Kafka running there?"
        raise SettingError("broker.kafka_port", settings.kafka_port, remedy) from None
    db = store.connect()
    broker = assemble(store, db, settings, clock, listener.getsockname()[1], credentials, guards)
    server = Server(broker)
    broker.writer.start()
    try:
        if store.lost:
            await dead_letter(broker, store.lost)
        await server.serve(listener)
        yield broker, server
    finally:
        await server.close()
        await broker.writer.stop()
        broker.readers.close()
        db.close()


def assemble(
    store: Store,
    db: sqlite3.Connection,
    settings: BrokerSettings,
    clock: Clock,
    port: int,
    credentials: Credentials = _NO_LOGIN,
    guards: tuple[disk.DiskGuard | None, disk.DiskGuard | None] = (None, None),
) -> Broker:
    """Create the parts of the broker, with the state that the file contains.

    Args:
        db: connection to the file, which only the writer uses from now on.
        port: port that the broker reports to Kafka clients.
        guards: free-space checks of the disk, for ordinary and for compacted topics.
    """
    stats, catalog = Stats(repaired=store.repaired, lost_batches=len(store.lost)), TopicCatalog()
    log_, offsets = Log(db), CommittedOffsets(db)
    topics, transactions = TopicStore(db, log_, PARTITIONS_MAX), Transactions(db, log_, offsets)
    writer = Writer(db, (topics, log_, transactions), catalog.apply, stats, committed=store.record_commit)
    coordinator = Coordinator(settings, writer, offsets, clock, stats)
    catalog.apply(topics.all())
    catalog.apply(log_.states())
    coordinator.load(db.execute("SELECT id, state, used_ms FROM groups").fetchall())
    cluster_id = db.execute("SELECT value FROM meta WHERE name = 'cluster_id'").fetchone()[0]
    return Broker(
        settings=settings,
        cluster_id=cluster_id,
        catalog=catalog,
        writer=writer,
        readers=Readers(store, _READER_THREADS),
        coordinator=coordinator,
        log=log_,
        topics=topics,
        offsets=offsets,
        transactions=transactions,
        upkeep=Upkeep(db, log_),
        clock=clock,
        stats=stats,
        fetch_memory=MemoryBudget(_FETCHES_BYTES_MAX),
        folder=str(store.path.parent),
        port=port,
        credentials=credentials,
        disk=guards[0],
        disk_of_tables=guards[1],
    )


async def _wait_for_failure(failed: asyncio.Future[None], store: Store) -> None:
    """Wait until a thread of the broker fails, and raise its exception. If the file is damaged, the next start will
    check and repair it."""
    try:
        await failed
    except Damaged as error:
        log.error("file_damaged", file=str(store.path), error=str(error), remedy="the next start repairs it")
        store.note_damage()
        raise


async def _tick(broker: Broker) -> None:
    """Call the coordinator at intervals, so that sessions and rebalances of consumer groups can time out. Never
    returns."""
    while True:
        await broker.clock.sleep(TICK_S)
        broker.coordinator.tick()


async def _retry_commits(broker: Broker) -> None:
    """While commits fail, submit an empty commit at intervals, so that the broker recovers even if no client writes.
    Never returns."""
    while True:
        await broker.clock.sleep(_TRY_INTERVAL_S)
        if broker.writer.trouble is not None:
            with contextlib.suppress(Rejected):
                await broker.writer.submit(broker.upkeep.touch)


async def _maintain(store: Store, broker: Broker) -> None:
    readers = Readers(store, 1)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_wait_for_failure(readers.failed, store))
            group.create_task(Maintenance(broker, readers).run())
    finally:
        readers.close()


async def _serve_http(common: Common, broker: Broker, server: Server) -> None:
    """Serve health and metrics over HTTP. The imports for this are slow, and run in a thread."""
    await asyncio.to_thread(batch.prepare)
    web = await asyncio.to_thread(import_module, "headrace_runtime.http.web")
    metrics = await asyncio.to_thread(import_module, "headrace_broker.metrics")
    metrics.register(broker, server)
    application = web.app({"store": lambda: broker.writer.trouble or True}, common=common)
    async with web.serve(application, broker.settings, common.security) as port:
        log.info("metrics", port=port)
        await asyncio.Event().wait()


_RAW_BYTES_MAX = 512 * 1024
"""Maximum number of damaged bytes in a dead letter, so that their base64 fits into a record."""


async def dead_letter(broker: Broker, lost_ranges: list[LostRange]) -> None:
    """Publish a dead letter for each lost range of offsets, if the topic `dead-letters` exists. The store has already
    logged the ranges."""
    from headrace_schemas import DeadLetter

    topic = broker.catalog.topics.get(DeadLetter.topic)
    if topic is None:
        return
    for lost in lost_ranges:
        raw = _dead_letter_batch(broker, lost)
        now_ms = broker.now_ms()
        try:
            await broker.writer.submit(lambda raw=raw, now_ms=now_ms: broker.log.append(  # type: ignore[misc]
                topic.partitions[0].id, parse_produced(raw), now_ms
            ))  # fmt: skip
        except Rejected as error:
            log.error("dead_letter_refused", topic=lost.topic, first_offset=lost.first_offset, error=str(error))


def _dead_letter_batch(broker: Broker, lost: LostRange) -> bytes:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder

    from headrace_schemas import DeadLetter
    from headrace_schemas.events.envelope import Envelope

    event = DeadLetter(
        time=broker.clock.now(),
        service="broker",
        source_topic=lost.topic,
        source_partition=lost.partition,
        source_offset=lost.first_offset,
        source_id=f"{lost.topic}/{lost.partition}/{lost.first_offset}-{lost.last_offset}",
        value_base64=base64.b64encode(lost.raw[:_RAW_BYTES_MAX]).decode(),
        reason="damaged_on_disk",
        error=f"offsets {lost.first_offset} to {lost.last_offset}: {lost.error}",
    )
    builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 4 * 1024 * 1024)
    headers = list(Envelope.of(event, "broker").headers())
    builder.append(0, broker.now_ms(), event.key.encode(), event.to_json(), headers)
    return bytes(builder.build())
