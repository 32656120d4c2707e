"""Reads ranges of topics without a consumer group. Needs the extra `headrace[topics]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace.bus_access import client_options, unreachable
from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace_schemas import Event
from headrace_schemas.blobs import BlobRef
from headrace_schemas.envelope import sequence_of
from headrace_schemas.names import decode_name
from headrace_schemas.records import parse_record
from headrace_schemas.text import printable

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient

_POLL_MS = 500
_PROBLEM_LENGTH_MAX = 2_000
_STORES = frozenset(("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"))
"""Protocols of blob stores. Over others, such as HTTP, a record could have any server asked for something."""
_BATCH_MAX = 500
_IDLE_POLLS_MAX = 60
"""After this many empty polls in a row before the end, the bus counts as unreachable."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a topic. Bounds are for each partition; ends are exclusive.

    Times are those of the records and are turned into offsets as Kafka does: the first record that is not earlier.
    """

    topic: str
    partitions: Collection[int] = ()
    """Empty: all."""
    from_offset: int | None = None
    to_offset: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    keys: Collection[str] = ()
    """Only records with one of these keys (session keys, on topics about sessions); empty: all."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record with its event, or with the reason why it has none."""

    topic: str
    partition: int
    offset: int
    time: datetime
    key: str
    event: Event | None
    problem: str | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def place(self) -> int:
        """Its place among the records of its key: the offset, the first one where a dead letter was put back."""
        first = sequence_of(self.headers)
        return self.offset if first is None else first


@dataclass(slots=True)
class Progress:
    """How far reading has come. `total` counts all offsets of the range, whatever their keys."""

    total: int = 0
    passed: int = 0
    truncated: bool = False
    """The beginning of the topic has been deleted."""


class Topics:
    """An open connection. One reading at a time; `connected` makes one."""

    def __init__(self, consumer: AIOKafkaConsumer, admin: AIOKafkaAdminClient) -> None:
        self._consumer = consumer
        self._admin = admin

    async def ends(self, topics: Iterable[str]) -> dict[str, dict[int, int]]:
        """End offsets by topic and partition, asked for one topic after the other in the given order."""
        found = {}
        for topic in topics:
            offsets = await self._consumer.end_offsets(await self._partitions(topic))
            found[topic] = {partition.partition: offset for partition, offset in offsets.items()}
        return found

    async def read(
        self, wanted: Range, progress: Progress | None = None, ends: Mapping[int, int] | None = None
    ) -> AsyncIterator[Entry]:
        """The entries of a range, in order within each partition, up to `ends` (default: those of now).

        Raises `UsageError` for a topic or partition that does not exist, `Unreachable` when the bus goes away.
        """
        async for message in self.records(wanted, progress, ends):
            yield await _entry(message)

    async def records(
        self, wanted: Range, progress: Progress | None = None, ends: Mapping[int, int] | None = None
    ) -> AsyncIterator[ConsumerRecord]:
        """Like `read`, without decoding the records."""
        progress = progress if progress is not None else Progress()
        spans = await self._spans(wanted, progress, ends or {})
        self._consumer.assign(list(spans))
        for partition, (start, _) in spans.items():
            self._consumer.seek(partition, start)
        idle = 0
        while spans:
            batches = await self._poll(spans)
            idle = 0 if batches else idle + 1
            if idle > _IDLE_POLLS_MAX:
                raise Unreachable(f"topic {wanted.topic}: the bus has stopped sending")
            for partition, messages in batches.items():
                end = spans[partition][1] if partition in spans else 0
                for message in messages:
                    if message.offset < end and (not wanted.keys or _key(message) in wanted.keys):
                        yield message
            await self._advance(spans, progress)

    async def _poll(self, spans: Iterable[TopicPartition]) -> Mapping[TopicPartition, Sequence[ConsumerRecord]]:
        """What came. A batch that fails its checksum is passed, offset by offset; its consumer dead-letters it."""
        from aiokafka.errors import CorruptRecordException

        try:
            found: Mapping[TopicPartition, Sequence[ConsumerRecord]] = await self._consumer.getmany(
                timeout_ms=_POLL_MS, max_records=_BATCH_MAX
            )
        except CorruptRecordException:
            for partition in spans:
                at = await self._consumer.position(partition)
                try:
                    await self._consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=1)
                except CorruptRecordException:
                    at += 1
                self._consumer.seek(partition, at)
            return {}
        return found

    async def _advance(self, spans: dict[TopicPartition, tuple[int, int]], progress: Progress) -> None:
        """Count what was passed, and forget partitions that are read to their end."""
        for partition, (at, end) in list(spans.items()):
            reached = min(await self._consumer.position(partition), end)
            progress.passed += reached - at
            spans[partition] = (reached, end)
            if reached >= end:
                del spans[partition]
                self._consumer.pause(partition)

    async def _spans(
        self, wanted: Range, progress: Progress, ends: Mapping[int, int]
    ) -> dict[TopicPartition, tuple[int, int]]:
        partitions = await self._partitions(wanted.topic)
        known = {one.partition for one in partitions}
        unknown = set(wanted.partitions) - known
        if unknown:
            raise UsageError(f"topic {wanted.topic} has {len(known)} partitions; there is no number {min(unknown)}")
        partitions = [one for one in partitions if not wanted.partitions or one.partition in wanted.partitions]
        first, last = await self._consumer.beginning_offsets(partitions), await self._consumer.end_offsets(partitions)
        progress.truncated = any(first.values())
        since = await self._at(partitions, wanted.since, first, last)
        until = await self._at(partitions, wanted.until, last, last)
        spans = {}
        for one in partitions:
            start = max(first[one], since[one], wanted.from_offset or 0)
            end = min(until[one], ends.get(one.partition, last[one]))
            end = min(end, wanted.to_offset) if wanted.to_offset is not None else end
            if start < end:
                spans[one] = (start, end)
                progress.total += end - start
        return spans

    async def _at(
        self,
        partitions: list[TopicPartition],
        time: datetime | None,
        untimed: Mapping[TopicPartition, int],
        last: Mapping[TopicPartition, int],
    ) -> Mapping[TopicPartition, int]:
        """The first offsets not earlier than `time`: `untimed` without one, the end where all are earlier."""
        if time is None:
            return untimed
        found = await self._consumer.offsets_for_times({one: int(time.timestamp() * 1000) for one in partitions})
        return {one: found[one].offset if found.get(one) else last[one] for one in partitions}

    async def partitions(self, topic: str) -> tuple[int, ...]:
        """The numbers of the topic's partitions; empty when there is no such topic."""
        every = await self._admin.describe_topics()  # who asks for one by name may thereby create it
        described = (one["partitions"] for one in every if one["topic"] == topic)
        return tuple(sorted(partition["partition"] for partition in next(described, ())))

    async def _partitions(self, topic: str) -> list[TopicPartition]:
        from aiokafka import TopicPartition

        found = await self.partitions(topic)
        if not found:
            raise UsageError(f"there is no topic {topic!r} on this bus")
        return [TopicPartition(topic, number) for number in found]


@asynccontextmanager
async def connected(bus: str) -> AsyncIterator[Topics]:
    """A connection to the bus at `bus`. Raises `Unreachable`, `UsageError` without the extra."""
    try:
        from aiokafka import AIOKafkaConsumer
        from aiokafka.admin import AIOKafkaAdminClient
        from aiokafka.errors import KafkaError
    except ImportError:
        raise UsageError("reading topics needs the extra: pip install 'headrace[topics]'") from None
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
    """Return the time of a record, 1970 for one that no calendar has: a producer may write any number."""
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
    place = message.topic, message.partition, message.offset
    return Entry(*place, time, _key(message), event, problem, tuple(message.headers))


async def event_of(topic: str, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> Event:
    """The event that a record of `topic` holds, fetched where the record only refers to it.

    Raises `HeadraceError` or `OSError` saying why there is none.
    """
    model, found = parse_record(topic, value, headers)
    return model.from_json(await asyncio.to_thread(fetch, found) if isinstance(found, BlobRef) else found)


def fetch(ref: BlobRef) -> bytes:
    """Fetch the bytes that a reference names and check their digest. Blocks.

    Raises `HeadraceError` for a reference that does not lead into a blob store: a topic may name any address.
    """
    import fsspec

    scheme, sign, _ = ref.uri.partition("://")
    if "::" in ref.uri or (scheme if sign else "file") not in _STORES or not ref.uri.endswith(f"/{ref.sha256}"):
        raise HeadraceError(
            f"blob {ref.uri[:200]!r} is not in a blob store; records may refer to blobs of stores alone"
        )
    with fsspec.open(ref.uri, "rb") as file:
        data: bytes = file.read()
    if not ref.matches(data):
        raise HeadraceError(f"blob {ref.uri} does not hash to its name; restore it from a backup")
    return data
