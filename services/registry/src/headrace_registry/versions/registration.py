"""Reads the topic `checkpoints`, checks each new version, and registers it.

There is no consumer group. The position is stored in the database in the transaction that registers the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.tables import STREAM
from headrace_registry.versions.transition import Transition
from headrace_runtime.errors import CorruptBlob, MissingBlob, Unavailable
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.versions import read_manifest
from headrace_runtime.stream.processor import Handling, Processor, read_positions
from headrace_schemas import Checkpoint, Event
from headrace_schemas.values.blobs import Manifest


class CheckpointHandler:
    """Stream handler that registers the versions that trainers publish.

    A version whose manifest does not match the checkpoint event is rejected.
    """

    def __init__(self, blobs: BlobStore, lease: LeaderLease) -> None:
        self._blobs = blobs
        self._lease = lease

    async def __call__(self, event: Checkpoint, handling: Handling) -> Sequence[Event]:
        """Register the version that a checkpoint event announces.

        Raises:
            Unavailable: the blob store does not respond.
            LostLeadership: another registry has become the leader.
        """
        await self._lease.check(handling.tx)
        manifest, problem = await self._manifest(event)
        transition = Transition(handling.tx, handling.now)
        await transition.register(event, manifest, problem)
        return await transition.finish()

    async def _manifest(self, event: Checkpoint) -> tuple[Manifest | None, str | None]:
        try:
            manifest = await asyncio.to_thread(read_manifest, self._blobs, event.manifest)
        except CorruptBlob as error:
            return None, str(error)
        except MissingBlob as error:
            return None, f"its manifest does not exist: {error}"
        return manifest, _mismatch(event, manifest)


def _mismatch(event: Checkpoint, manifest: Manifest) -> str | None:
    if manifest.version != event.version:
        return f"its manifest is that of {manifest.version}"
    if manifest.name != event.model:
        return f"its manifest names the model {manifest.name}, the checkpoint {event.model}"
    if (manifest.lineage, manifest.step, manifest.parent) != (event.lineage, event.step, event.parent):
        return "its manifest has another lineage, step or parent than the checkpoint"
    return None


log = get_logger(__name__)
_BATCH_MAX = 200
_RECONNECT_S = 0.5


class CheckpointReader:
    """Reader of `checkpoints` that passes each record to the processor, at least once and in order.

    The event `following` is set while it is connected to the bus.
    """

    def __init__(
        self, processor: Processor, database: Database, bus: BusSettings, on_registered: Callable[[], None]
    ) -> None:
        """Create a reader. It calls `on_registered` after each batch of checkpoints."""
        self._on_registered = on_registered
        self._processor = processor
        self._database = database
        self._bus = bus
        self.following = asyncio.Event()

    async def run(self) -> None:
        """Read until cancelled, and reconnect after a failure of the bus. Raises if the processor stops retrying."""
        while True:
            reader = consumer(self._bus, "headrace-registry")
            try:
                await self._connect(reader)
                while True:
                    await self._processor.process(await _poll(reader))
                    self._on_registered()
            except (KafkaError, OSError, _BusAway) as error:
                log.warning("reader_reconnects", error=repr(error))
            finally:
                self.following.clear()
                await reader.stop()
            await asyncio.sleep(_RECONNECT_S)

    async def _connect(self, reader: AIOKafkaConsumer) -> None:
        await reader.start()
        try:
            partitions = await assign_all(reader, Checkpoint.topic)
        except Unavailable as error:
            raise _BusAway(str(error)) from error
        async with self._database.transaction() as tx:
            reached = await read_positions(tx, STREAM, Checkpoint.topic)
        for partition in partitions:
            reader.seek(partition, reached.get(partition.partition, 0))
        self.following.set()


class _BusAway(Exception):
    """Raised if the topic does not exist yet. It requires a new connection, in contrast to `Unavailable` from the
    processor."""


async def _poll(reader: AIOKafkaConsumer) -> list[Record]:
    while True:
        batches = await reader.getmany(timeout_ms=1000, max_records=_BATCH_MAX)
        records = [record_of(message) for messages in batches.values() for message in messages]
        if records:
            return records
