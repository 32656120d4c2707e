"""Reads `checkpoints` without a consumer group: the position is stored in the database with the effect."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from headrace_registry.tables import STREAM
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.database import Database
from headrace_runtime.stream.processor import Processor, position
from headrace_schemas import Checkpoint

log = get_logger(__name__)
_BATCH_MAX = 200
_RECONNECT_S = 0.5


class CheckpointReader:
    """Passes every checkpoint to the processor, at least once and in order. `following` is set while it is
    connected."""

    def __init__(self, processor: Processor, database: Database, bus: BusSettings) -> None:
        self._processor = processor
        self._database = database
        self._bus = bus
        self.following = asyncio.Event()

    async def run(self) -> None:
        """Read until cancelled. Reconnects after a bus failure. Raises when the processor stops retrying."""
        while True:
            reader = consumer(self._bus, "headrace-registry")
            try:
                await self._connect(reader)
                while True:
                    await self._processor.process(await _poll(reader))
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
            reached = await position(tx, STREAM, Checkpoint.topic)
        for partition in partitions:
            reader.seek(partition, reached.get(partition.partition, 0))
        self.following.set()


class _BusAway(Exception):
    """The topic does not exist yet. Unlike `Unavailable` from the processor, this calls for another connection."""


async def _poll(reader: AIOKafkaConsumer) -> list[Record]:
    while True:
        batches = await reader.getmany(timeout_ms=1000, max_records=_BATCH_MAX)
        records = [record_of(message) for messages in batches.values() for message in messages]
        if records:
            return records
