"""Reads the bus without Faust: raw records, and compacted topics as tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from headrace_runtime.blobs import BlobStore
from headrace_runtime.bus_client import client_options
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.isolation import is_fatal, reason_of
from headrace_runtime.logs import get_logger
from headrace_runtime.settings import BusSettings
from headrace_runtime.wire import Patience, Record
from headrace_schemas import Event
from headrace_schemas.names import decode_name

log = get_logger(__name__)
E_co = TypeVar("E_co", bound=Event)


def consumer(settings: BusSettings, client_id: str, **options: object) -> AIOKafkaConsumer:
    """An aiokafka consumer with our defaults: no automatic commits, from the earliest record. Not started yet."""
    defaults: dict[str, object] = {
        **client_options(settings),
        "client_id": client_id,
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "request_timeout_ms": int(settings.request_timeout_s * 1000),
        "session_timeout_ms": int(settings.session_timeout_s * 1000),
        "heartbeat_interval_ms": 1_000,
        "fetch_max_wait_ms": 250,
        "check_crcs": True,
    }
    return AIOKafkaConsumer(**{**defaults, **options})


def record_of(message: ConsumerRecord) -> Record:
    return Record(
        message.topic,
        message.partition,
        message.offset,
        message.key,
        message.value,
        tuple(message.headers),
        message.timestamp,
    )


async def assign_all(reader: AIOKafkaConsumer, topic: str) -> list[TopicPartition]:
    """Assign every partition of `topic` by hand (no consumer group) and return them in order."""
    partitions = await partitions_of(reader, topic)
    reader.assign(partitions)
    return partitions


async def partitions_of(reader: AIOKafkaConsumer, topic: str) -> list[TopicPartition]:
    """Every partition of `topic`, in order. Raises `Unavailable` when it does not exist (yet)."""
    # aiokafka 0.14 has no public way: `topics()` asks the same and returns names alone, `partitions_for_topic` knows
    # only what is subscribed to, and the admin client would be one more connection for each reader.
    cluster = await reader._client.fetch_all_metadata()
    partitions = [TopicPartition(topic, number) for number in sorted(cluster.partitions_for_topic(topic) or ())]
    if not partitions:
        raise Unavailable(f"topic {topic} does not exist yet")
    return partitions


class Table(Generic[E_co]):
    """A compacted topic as a dictionary from key to newest event. One task (`run`) keeps it current.

    `changed` is called after each change, in the event loop; it must not block. `refuse` gets what cannot be decoded,
    and dead-letters it (`headrace_runtime.dead_letters.Refusals`). `accepts` decides about a valid event: the row
    stays as it was when it returns False.
    """

    def __init__(
        self,
        event: type[E_co],
        settings: BusSettings,
        client_id: str,
        blobs: BlobStore,
        refuse: Callable[[Record, InvalidEvent], Awaitable[None]],
        changed: Callable[[str, E_co | None], None] | None = None,
        accepts: Callable[[E_co], bool] = lambda _event: True,
    ) -> None:
        self._accepts = accepts
        self._event = event
        self._settings = settings
        self._client_id = client_id
        self._blobs = blobs
        self._refuse = refuse
        self._changed = changed
        self.rows: dict[str, E_co] = {}
        self.loaded = asyncio.Event()
        """Set once everything that was there at the start has been read."""

    async def run(self) -> None:
        """Read for ever; a bus that goes away is waited for. Cancelled by the owner."""
        while True:
            try:
                await self._follow()
            except (KafkaError, OSError, Unavailable) as error:
                log.warning("table_reconnects", topic=self._event.topic, error=repr(error))
                await asyncio.sleep(0.5)

    async def _follow(self) -> None:
        reader = consumer(self._settings, self._client_id)
        try:
            await reader.start()
            partitions = await assign_all(reader, self._event.topic)
            await reader.seek_to_beginning(*partitions)
            ends = await reader.end_offsets(partitions)
            async for record in _records(reader):
                if record is not None:
                    await self._apply(record)
                if not self.loaded.is_set():
                    positions = [await reader.position(partition) for partition in partitions]
                    if all(at >= ends[partition] for at, partition in zip(positions, partitions, strict=True)):
                        self.loaded.set()
        finally:
            await reader.stop()

    async def _apply(self, record: Record) -> None:
        """Apply one record. One that breaks its reader is refused like one that cannot be decoded."""
        key = decode_name(record.key or b"")
        before = self.rows.get(key)
        try:
            await self._take(record, key)
        except Exception as error:
            if is_fatal(error):
                raise
            if before is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = before
            log.warning("row_refused", topic=record.topic, offset=record.offset, kind=type(error).__name__)
            refusal = error if isinstance(error, InvalidEvent) else InvalidEvent("handler_error", reason_of(error))
            await self._refuse(record, refusal)  # the row stays as it was

    async def _take(self, record: Record, key: str) -> None:
        event: E_co | None = None
        if record.value is not None:
            received = await Patience(SystemClock()).decode(record, self._blobs)
            if not isinstance(received.event, self._event) or not self._accepts(received.event):
                return
            event = received.event
        if event is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = event
        if self._changed:
            self._changed(key, event)


async def _records(reader: AIOKafkaConsumer) -> AsyncIterator[Record | None]:
    """Records as they come, and None after each poll, so that the caller can look at its position."""
    while True:
        batches = await reader.getmany(timeout_ms=200, max_records=500)
        for messages in batches.values():
            for message in messages:
                yield record_of(message)
        yield None
