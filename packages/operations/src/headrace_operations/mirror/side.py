"""Connection to one of the two buses of a mirror: list topics, read ranges of partitions, write at given offsets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace.producing import client_options

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient

CONFIG = ("cleanup.policy", "retention.ms", "retention.bytes", "max.message.bytes", "delete.retention.ms")
"""Configuration entries of a topic that are copied."""
_POLL_MS = 500
_WAIT_MS = 10
"""Short, because the records exist already; a long wait at the end of a log would delay the next partition."""
_BATCH_MAX = 500
_IDLE_POLLS_MAX = 60
_REQUEST_BYTES_SPARE = 65_536


class MirrorConflict(HeadraceError):
    """Error of a target bus that has records or positions which the source bus does not have."""


@dataclass(frozen=True, slots=True)
class Row:
    """Key, value, headers and time of a record, without its position."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic with its number of partitions and its configuration."""

    name: str
    partitions: int
    config: Mapping[str, str]

    @property
    def is_table(self) -> bool:
        return "compact" in self.config["cleanup.policy"]


def record_row(record: ConsumerRecord) -> Row:
    return Row(record.key, record.value, tuple(record.headers), record.timestamp)


class Side:
    """Open connection to one of the two buses; `open_side` creates it. It can read one range at a time."""

    def __init__(self, bus: str, admin: AIOKafkaAdminClient, reader: AIOKafkaConsumer, stack: AsyncExitStack) -> None:
        self.bus = bus
        self.admin = admin
        self._reader = reader
        self._stack = stack
        self._producer: AIOKafkaProducer | None = None

    async def topics(self) -> dict[str, Topic]:
        """Return all topics except internal ones, by name."""
        names = sorted(name for name in await self.admin.list_topics() if not name.startswith("__"))
        described = await self.admin.describe_topics(names) if names else []
        counts = {topic["topic"]: len(topic["partitions"]) for topic in described}
        return {name: Topic(name, counts[name], await self._config(name)) for name in names}

    async def _config(self, topic: str) -> dict[str, str]:
        from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

        config_resource = ConfigResource(ConfigResourceType.TOPIC, topic, dict.fromkeys(CONFIG))
        (response,) = await self.admin.describe_configs([config_resource])
        return {entry[0]: entry[1] for resource in response.resources for entry in resource[4] if entry[0] in CONFIG}

    async def create(self, topics: Iterable[Topic], replication: int) -> None:
        """Create topics and wait until all partitions have a leader.

        Raises:
            UsageError: the bus refused a topic.
        """
        from aiokafka.admin import NewTopic

        new = [
            NewTopic(topic.name, topic.partitions, replication, topic_configs=dict(topic.config)) for topic in topics
        ]
        if not new:
            return
        response = await self.admin.create_topics(new)
        for name, code, message, *_ in response.topic_errors:
            if code:
                raise UsageError(f"{self.bus} refused topic {name}: {message or f'error {code}'}")
        async with asyncio.timeout(30):
            while True:
                if await self._have_leaders([topic.name for topic in new]):
                    return
                await asyncio.sleep(0.1)

    async def _have_leaders(self, names: Sequence[str]) -> bool:
        described = await self.admin.describe_topics(list(names))
        return all(
            topic["error_code"] == 0 and all(partition["leader"] >= 0 for partition in topic["partitions"])
            for topic in described
        )

    async def bounds(self, topic_partitions: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Return the present first and end offsets of each partition."""
        if not topic_partitions:
            return {}
        first, last = (
            await self._reader.beginning_offsets(topic_partitions),
            await self._reader.end_offsets(topic_partitions),
        )
        return {
            topic_partition: (first[topic_partition], last[topic_partition]) for topic_partition in topic_partitions
        }

    async def read(
        self, topic_partition: TopicPartition, start: int, end: int
    ) -> AsyncGenerator[tuple[int, Row], None]:
        """Yield the committed records between two offsets with their offsets.

        Raises:
            Unreachable: the bus stopped sending records.
        """
        if start >= end:
            return
        self._reader.assign([topic_partition])
        self._reader.seek(topic_partition, start)
        idle = 0
        while await self._reader.position(topic_partition) < end:
            batches = await self._reader.getmany(topic_partition, timeout_ms=_POLL_MS, max_records=_BATCH_MAX)
            idle = 0 if batches else idle + 1
            if idle > _IDLE_POLLS_MAX:
                raise Unreachable(
                    f"{self.bus} has stopped sending {topic_partition.topic}[{topic_partition.partition}]"
                )
            for record in batches.get(topic_partition, []):
                if record.offset < end:
                    yield record.offset, record_row(record)

    async def open_producer(self, *, largest: int, batch: int) -> None:
        """Open the producer; call it once before the first `append`.

        Args:
            largest: size limit of a record in bytes, the largest of all topics.
            batch: size of a batch in bytes, which the smallest limit of a topic must allow.
        """
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(
            **client_options(self.bus),
            client_id="headrace-mirror",
            acks="all",
            enable_idempotence=True,
            max_request_size=largest + _REQUEST_BYTES_SPARE,
            max_batch_size=batch,
        )
        self._stack.push_async_callback(producer.stop)
        await producer.start()
        self._producer = producer

    async def append(self, topic_partition: TopicPartition, rows: Sequence[Row], at: int | None) -> None:
        """Write rows and wait for their acknowledgement.

        Args:
            topic_partition: the partition.
            rows: the rows.
            at: offset that the first row must get; None if the offsets do not matter.

        Raises:
            MirrorConflict: another producer writes to the partition.
        """
        assert self._producer is not None
        acks = [
            await self._producer.send(
                topic_partition.topic,
                row.value,
                row.key,
                topic_partition.partition,
                row.timestamp_ms,
                list(row.headers),
            )
            for row in rows
        ]
        for number, metadata in enumerate(await asyncio.gather(*acks)):
            if at is not None:
                self._check_offset(topic_partition, metadata.offset, at + number)

    async def append_repeated(self, topic_partition: TopicPartition, row: Row, count: int, at: int) -> None:
        """Append `count` copies of a small record without headers, the first of which must get the offset `at`.

        Raises as `append` does.
        """
        assert self._producer is not None
        acks = []
        while count:
            batch = self._producer.create_batch()
            size = 0
            while size < count and batch.append(key=row.key, value=row.value, timestamp=row.timestamp_ms) is not None:
                size += 1
            acks.append(
                (at, await self._producer.send_batch(batch, topic_partition.topic, partition=topic_partition.partition))
            )
            at, count = at + size, count - size
        for expected, ack in acks:
            self._check_offset(topic_partition, (await ack).offset, expected)

    def _check_offset(self, topic_partition: TopicPartition, actual: int, expected: int) -> None:
        if actual != expected:
            raise MirrorConflict(
                f"{topic_partition.topic}[{topic_partition.partition}] on {self.bus}: a record got offset {actual} "
                f"instead of {expected}, so another producer writes there; stop it, delete the topic and mirror again"
            )

    async def commit(self, group: str, positions: Mapping[TopicPartition, tuple[int, str]]) -> None:
        """Set the committed positions of a consumer group.

        Raises:
            MirrorConflict: the group has members on this bus.
        """
        from aiokafka import AIOKafkaConsumer
        from aiokafka.errors import CommitFailedError, UnknownMemberIdError

        consumer = AIOKafkaConsumer(**client_options(self.bus), group_id=group, enable_auto_commit=False)
        try:
            await consumer.start()
            consumer.assign(list(positions))
            await consumer.commit(dict(positions))
        except (CommitFailedError, UnknownMemberIdError) as error:
            raise MirrorConflict(f"group {group}: has members on {self.bus}; stop the services there first") from error
        finally:
            await consumer.stop()

    async def delete_before(self, topic_partition: TopicPartition, offset: int) -> None:
        """Delete the records before `offset`.

        Raises:
            UsageError: the bus cannot delete records.
        """
        from aiokafka.admin import RecordsToDelete
        from aiokafka.errors import KafkaError

        try:
            await self.admin.delete_records({topic_partition: RecordsToDelete(before_offset=offset)})
        except (KafkaError, NotImplementedError) as error:
            raise UsageError(
                f"{topic_partition.topic}[{topic_partition.partition}]: must begin at {offset} on {self.bus} as well, "
                f"but that bus refused to delete records ({error!r}); mirror with the permission to delete records "
                "there"
            ) from error


@asynccontextmanager
async def open_side(bus: str) -> AsyncIterator[Side]:
    """Connect to a bus.

    Raises:
        Unreachable: the bus does not answer.
        UsageError: the extra `topics` is not installed, or a record is too large for a topic.
    """
    try:
        from aiokafka import AIOKafkaConsumer
        from aiokafka.admin import AIOKafkaAdminClient
        from aiokafka.errors import KafkaError, MessageSizeTooLargeError
    except ImportError:
        raise UsageError("mirroring needs the extra: pip install 'headrace-client[topics]'") from None
    async with AsyncExitStack() as stack:
        try:
            reader = AIOKafkaConsumer(
                **client_options(bus),
                client_id="headrace-mirror",
                enable_auto_commit=False,
                auto_offset_reset="none",
                isolation_level="read_committed",
                fetch_max_wait_ms=_WAIT_MS,
            )
            stack.push_async_callback(reader.stop)
            await reader.start()
            admin = AIOKafkaAdminClient(**client_options(bus), client_id="headrace-mirror")
            stack.push_async_callback(admin.close)
            await admin.start()
            yield Side(bus, admin, reader, stack)
        except MessageSizeTooLargeError as error:
            raise UsageError(f"{bus}: {error}; raise max.message.bytes of the topic there and mirror again") from error
        except (KafkaError, OSError) as error:
            raise Unreachable(f"bus {bus}: {error!r}; run the same command again to continue") from error
