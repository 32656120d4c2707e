"""Consumers that do not use Faust: raw records, compacted topics as dictionaries, and offsets of partitions and
consumer groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.topics import client_options
from headrace_runtime.kafka.wire import BatchDecoder, Record
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.isolation import is_fatal, reason_of
from headrace_schemas import Event
from headrace_schemas.values.ids import decode_name

log = get_logger(__name__)
E_co = TypeVar("E_co", bound=Event)


def consumer(settings: BusSettings, client_id: str, **options: object) -> AIOKafkaConsumer:
    """Create an aiokafka consumer that commits nothing by itself and begins at the earliest record.

    The caller must start and stop it.
    """
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
    """Convert aiokafka's record to a `Record`."""
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
    """Assign all partitions of `topic` to the consumer without a consumer group, and return them in order."""
    partitions = await partitions_of(reader, topic)
    reader.assign(partitions)
    return partitions


async def partitions_of(reader: AIOKafkaConsumer, topic: str) -> list[TopicPartition]:
    """Return all partitions of `topic` in order. Raises `Unavailable` if the topic does not exist yet."""
    # aiokafka 0.14 has no public method: `topics()` sends the same request but returns only names,
    # `partitions_for_topic` only has subscribed topics, and an admin client would need another connection.
    cluster = await reader._client.fetch_all_metadata()
    partitions = [TopicPartition(topic, number) for number in sorted(cluster.partitions_for_topic(topic) or ())]
    if not partitions:
        raise Unavailable(f"topic {topic} does not exist yet")
    return partitions


class TopicTable(Generic[E_co]):
    """Dictionary with the latest event of each key of a compacted topic. The task `run` keeps it current."""

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
        """Create an empty table.

        Args:
            event: the event class of the topic.
            settings: the settings of the bus.
            client_id: the id of the Kafka client.
            blobs: the store of large events.
            refuse: function that dead-letters a record that cannot be decoded, for example a `DeadLetterSender`.
            changed: function that is called with the key and the new event (None if removed) after each change, in the
                event loop. It must not block.
            accepts: function that returns whether a valid event is applied. Otherwise its row stays unchanged.
        """
        self._accepts = accepts
        self._event = event
        self._settings = settings
        self._client_id = client_id
        self._blobs = blobs
        self._refuse = refuse
        self._changed = changed
        self.rows: dict[str, E_co] = {}
        self.loaded = asyncio.Event()
        """Set once all records that existed at the start have been read."""

    async def run(self) -> None:
        """Read the topic until cancelled. After a failure of the bus, reconnect and continue."""
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
        """Apply one record. If `changed` or `accepts` raises, the record is dead-lettered like one that cannot be
        decoded."""
        key = decode_name(record.key or b"")
        previous = self.rows.get(key)
        try:
            await self._update(record, key)
        except Exception as error:
            if is_fatal(error):
                raise
            if previous is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = previous
            log.warning("row_refused", topic=record.topic, offset=record.offset, kind=type(error).__name__)
            refusal = error if isinstance(error, InvalidEvent) else InvalidEvent("handler_error", reason_of(error))
            await self._refuse(record, refusal)

    async def _update(self, record: Record, key: str) -> None:
        event: E_co | None = None
        if record.value is not None:
            received = await BatchDecoder(SystemClock()).decode(record, self._blobs)
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
    """Yield records as they arrive, and None after each poll, so that the caller can check whether the end was
    reached."""
    while True:
        batches = await reader.getmany(timeout_ms=200, max_records=500)
        for messages in batches.values():
            for message in messages:
                yield record_of(message)
        yield None


class Offsets:
    """Connection to the bus for reading the end offsets of topics and the committed offsets of a consumer group.

    Call `start` before use. Methods raise `Unavailable` if the bus does not respond.
    """

    def __init__(self, bus: BusSettings, group: str | None, client: str = "") -> None:
        """Create the reader of offsets.

        Args:
            bus: the settings of the bus.
            group: the consumer group whose committed offsets are read. With None only `ends` may be called.
            client: the id of the Kafka client, by default the name of the group followed by `-offsets`.
        """
        self._bus = bus
        self._group = group
        self._client = client or f"{group}-offsets"
        self._reader: AIOKafkaConsumer | None = None
        self._partitions: dict[str, list[TopicPartition]] = {}

    async def start(self) -> None:
        """Connect to the bus."""
        reader = consumer(
            self._bus, self._client, group_id=self._group
        )  # without a subscription it does not join the group
        try:
            await reader.start()
        except (KafkaError, OSError) as error:
            await reader.stop()
            raise Unavailable(f"bus {self._bus.address}: {error!r}") from error
        self._reader = reader

    async def stop(self) -> None:
        """Disconnect from the bus."""
        if self._reader is not None:
            await self._reader.stop()
            self._reader = None

    async def ends(self, topic: str) -> Mapping[int, int]:
        """Return the end offset of each partition of `topic`, which is the offset of the next record to be written."""
        try:
            end_offsets = await self._connected().end_offsets(await self._partitions_of(topic))
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: end of {topic}: {error!r}") from error
        return {partition.partition: offset for partition, offset in end_offsets.items()}

    async def starts(self, topics: Sequence[str]) -> Mapping[tuple[str, int], int]:
        """Return, by topic and partition, the offset at which the group will begin to read: its committed offset, or
        that of the oldest record."""
        try:
            starts: dict[tuple[str, int], int] = {}
            for topic in topics:
                beginnings = await self._connected().beginning_offsets(await self._partitions_of(topic))
                for partition, beginning in beginnings.items():
                    committed = await self._connected().committed(partition)
                    starts[topic, partition.partition] = beginning if committed is None else committed
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: offsets of {self._group}: {error!r}") from error
        return starts

    def _connected(self) -> AIOKafkaConsumer:
        if self._reader is None:
            raise Unavailable("the reader of offsets is not started")
        return self._reader

    async def _partitions_of(self, topic: str) -> list[TopicPartition]:
        if topic not in self._partitions:
            self._partitions[topic] = await partitions_of(self._connected(), topic)
        return self._partitions[topic]
