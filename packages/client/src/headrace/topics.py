"""Reading of ranges of topics without a consumer group. Needs the extra `headrace-client[topics]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace.producing import client_options, unreachable
from headrace_schemas import Event
from headrace_schemas.events.envelope import parse_record, sequence_of
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.ids import decode_name
from headrace_schemas.values.text import printable

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient

_POLL_MS = 500
_PROBLEM_LENGTH_MAX = 2_000
_STORES = frozenset(("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"))
"""Protocols of blob stores from which payloads are read. If others such as HTTP were permitted, a record could make
this program send requests to any server."""
_BATCH_MAX = 500
_IDLE_POLLS_MAX = 60
"""Number of consecutive empty polls before the end of a range after which the bus counts as unreachable."""


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a topic. Bounds apply to each partition; upper bounds are exclusive.

    Times are record timestamps. As in Kafka, a time selects the first record that is not earlier.
    """

    topic: str
    partitions: Collection[int] = ()
    """Partition numbers; empty for all."""
    from_offset: int | None = None
    to_offset: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    keys: Collection[str] = ()
    """Keys of the records to read (session keys, on topics about sessions); empty for all."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Record with its decoded event, or with the reason why it contains no valid event."""

    topic: str
    partition: int
    offset: int
    time: datetime
    key: str
    event: Event | None
    problem: str | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def sequence(self) -> int:
        """Position among the records with the same key.

        It is the offset, or the offset of the original record if this record re-publishes a dead letter.
        """
        first = sequence_of(self.headers)
        return self.offset if first is None else first

    @property
    def place(self) -> int:
        """Old name of `sequence`, the record's position among the records with the same key. Deprecated."""
        return self.sequence


@dataclass(slots=True)
class Progress:
    """Progress of reading a range. `total` counts all offsets of the range, whatever their keys."""

    total: int = 0
    passed: int = 0
    truncated: bool = False
    """Whether the beginning of the range was already deleted from the topic."""


class Topics:
    """Open connection for reading topics. It supports one reader at a time. `connected` creates it."""

    def __init__(self, consumer: AIOKafkaConsumer, admin: AIOKafkaAdminClient) -> None:
        self._consumer = consumer
        self._admin = admin

    async def ends(self, topics: Iterable[str]) -> dict[str, dict[int, int]]:
        """Return end offsets by topic and partition. Topics are queried one after the other, in the given order."""
        ends = {}
        for topic in topics:
            offsets = await self._consumer.end_offsets(await self._partitions(topic))
            ends[topic] = {partition.partition: offset for partition, offset in offsets.items()}
        return ends

    async def read(
        self, selection: Range, progress: Progress | None = None, ends: Mapping[int, int] | None = None
    ) -> AsyncIterator[Entry]:
        """Yield the entries of a range, in order within each partition, up to `ends` (by default the present end
        offsets).

        Raises:
            UsageError: the topic or a partition does not exist.
            Unreachable: the bus stopped answering.
        """
        async for message in self.records(selection, progress, ends):
            yield await _entry(message)

    async def records(
        self, selection: Range, progress: Progress | None = None, ends: Mapping[int, int] | None = None
    ) -> AsyncIterator[ConsumerRecord]:
        """Yield the raw records of a range, in order within each partition. The arguments are those of `read`."""
        progress = progress if progress is not None else Progress()
        spans = await self._spans(selection, progress, ends or {})
        self._consumer.assign(list(spans))
        for partition, (start, _) in spans.items():
            self._consumer.seek(partition, start)
        idle = 0
        while spans:
            batches = await self._poll(spans)
            idle = 0 if batches else idle + 1
            if idle > _IDLE_POLLS_MAX:
                raise Unreachable(f"topic {selection.topic}: the bus has stopped sending")
            for partition, messages in batches.items():
                end = spans[partition][1] if partition in spans else 0
                for message in messages:
                    if message.offset < end and (not selection.keys or _key(message) in selection.keys):
                        yield message
            await self._advance(spans, progress)

    async def _poll(self, spans: Iterable[TopicPartition]) -> Mapping[TopicPartition, Sequence[ConsumerRecord]]:
        """Return the next records by partition. A batch with a wrong checksum is skipped, offset by offset.

        The consumers of the topic dead-letter such a batch.
        """
        from aiokafka.errors import CorruptRecordException

        try:
            batches: Mapping[TopicPartition, Sequence[ConsumerRecord]] = await self._consumer.getmany(
                timeout_ms=_POLL_MS, max_records=_BATCH_MAX
            )
        except CorruptRecordException:
            for partition in spans:
                position = await self._consumer.position(partition)
                try:
                    await self._consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=1)
                except CorruptRecordException:
                    position += 1
                self._consumer.seek(partition, position)
            return {}
        return batches

    async def _advance(self, spans: dict[TopicPartition, tuple[int, int]], progress: Progress) -> None:
        """Add the offsets that were read to the progress, and remove partitions that were read to their end."""
        for partition, (at, end) in list(spans.items()):
            reached = min(await self._consumer.position(partition), end)
            progress.passed += reached - at
            spans[partition] = (reached, end)
            if reached >= end:
                del spans[partition]
                self._consumer.pause(partition)

    async def _spans(
        self, selection: Range, progress: Progress, ends: Mapping[int, int]
    ) -> dict[TopicPartition, tuple[int, int]]:
        partitions = await self._partitions(selection.topic)
        numbers = {partition.partition for partition in partitions}
        unknown = set(selection.partitions) - numbers
        if unknown:
            raise UsageError(
                f"topic {selection.topic} has {len(numbers)} partitions; there is no number {min(unknown)}"
            )
        partitions = [
            partition
            for partition in partitions
            if not selection.partitions or partition.partition in selection.partitions
        ]
        first, last = await self._consumer.beginning_offsets(partitions), await self._consumer.end_offsets(partitions)
        progress.truncated = any(first.values())
        since = await self._at(partitions, selection.since, first, last)
        until = await self._at(partitions, selection.until, last, last)
        spans = {}
        for partition in partitions:
            start = max(first[partition], since[partition], selection.from_offset or 0)
            end = min(until[partition], ends.get(partition.partition, last[partition]))
            end = min(end, selection.to_offset) if selection.to_offset is not None else end
            if start < end:
                spans[partition] = (start, end)
                progress.total += end - start
        return spans

    async def _at(
        self,
        partitions: list[TopicPartition],
        time: datetime | None,
        untimed: Mapping[TopicPartition, int],
        last: Mapping[TopicPartition, int],
    ) -> Mapping[TopicPartition, int]:
        """Return for each partition the offset of the first record at or after `time`.

        Args:
            untimed: result if `time` is None.
            last: end offsets, for partitions whose records are all earlier.
        """
        if time is None:
            return untimed
        offsets = await self._consumer.offsets_for_times(
            {partition: int(time.timestamp() * 1000) for partition in partitions}
        )
        return {
            partition: offsets[partition].offset if offsets.get(partition) else last[partition]
            for partition in partitions
        }

    async def partitions(self, topic: str) -> tuple[int, ...]:
        """Return the numbers of a topic's partitions, or an empty tuple if there is no such topic."""
        descriptions = await self._admin.describe_topics()  # describing a topic by name may create it
        described = (description["partitions"] for description in descriptions if description["topic"] == topic)
        return tuple(sorted(partition["partition"] for partition in next(described, ())))

    async def _partitions(self, topic: str) -> list[TopicPartition]:
        from aiokafka import TopicPartition

        numbers = await self.partitions(topic)
        if not numbers:
            raise UsageError(f"topic {topic!r}: does not exist on this bus; check the name and the bus")
        return [TopicPartition(topic, number) for number in numbers]


@asynccontextmanager
async def connected(bus: str) -> AsyncIterator[Topics]:
    """Connect to the bus at `bus` for reading topics.

    Raises:
        Unreachable: the bus does not answer.
        UsageError: the extra `headrace-client[topics]` is not installed.
    """
    try:
        from aiokafka import AIOKafkaConsumer
        from aiokafka.admin import AIOKafkaAdminClient
        from aiokafka.errors import KafkaError
    except ImportError:
        raise UsageError("reading topics needs the extra: pip install 'headrace-client[topics]'") from None
    consumer = AIOKafkaConsumer(
        **client_options(bus), client_id="headrace", enable_auto_commit=False, fetch_max_wait_ms=250
    )
    admin = AIOKafkaAdminClient(**client_options(bus), client_id="headrace")
    try:
        await consumer.start()
        await admin.start()
        yield Topics(consumer, admin)
    except (KafkaError, OSError) as error:
        raise await unreachable(bus, error) from error
    finally:
        await admin.close()
        await consumer.stop()


def _key(message: ConsumerRecord) -> str:
    return decode_name(message.key or b"")


def _time(timestamp_ms: int | None) -> datetime:
    """Convert the timestamp of a record. For a number that no calendar date corresponds to, return the beginning of
    1970."""
    try:
        return datetime.fromtimestamp((timestamp_ms or 0) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


async def _entry(message: ConsumerRecord) -> Entry:
    event, problem = None, None
    try:
        event = await event_of(message.topic, message.value, message.headers)
    except (HeadraceError, OSError, ValueError, RecursionError, OverflowError) as error:
        problem = printable(str(error), _PROBLEM_LENGTH_MAX)
    time = _time(message.timestamp)
    position = message.topic, message.partition, message.offset
    return Entry(*position, time, _key(message), event, problem, tuple(message.headers))


async def event_of(topic: str, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> Event:
    """Return the event in a record of `topic`. If the record only contains a reference, the event is read from the blob
    store.

    Raises:
        HeadraceError: the record contains no valid event.
        OSError: the blob cannot be read.
    """
    model, payload = parse_record(topic, value, headers)
    return model.from_json(await asyncio.to_thread(fetch, payload) if isinstance(payload, BlobRef) else payload)


def fetch(ref: BlobRef) -> bytes:
    """Read a blob from its store, and check it against its digest. Blocks.

    Raises:
        HeadraceError: the reference does not have the protocol of a blob store, or the digest differs.
    """
    import fsspec

    scheme, sign, _ = ref.uri.partition("://")
    if "::" in ref.uri or (scheme if sign else "file") not in _STORES or not ref.uri.endswith(f"/{ref.sha256}"):
        raise HeadraceError(
            f"blob {ref.uri[:200]!r} is not in a blob store; records may refer only to blobs in a store"
        )
    try:
        with fsspec.open(ref.uri, "rb") as file:
            data: bytes = file.read(ref.size + 1)
    except (ImportError, ValueError) as error:
        text = f"blob {ref.uri}: cannot be opened here: {error}; install the library of its store"
        raise HeadraceError(text) from error
    if not ref.matches(data):
        raise HeadraceError(
            f"blob {ref.uri}: its content does not match the digest in its name; restore it from a backup"
        )
    return data
