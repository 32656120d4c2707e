"""One of the two buses: lists its topics, reads a range of a partition, writes to exact offsets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.bus_access import client_options
from headrace.errors import HeadraceError, Unreachable, UsageError

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient

CONFIG = ("cleanup.policy", "retention.ms", "retention.bytes", "max.message.bytes", "delete.retention.ms")
"""What of a topic's configuration is copied."""
_POLL_MS = 500
_WAIT_MS = 10
"""Little: what is read is there already, and a request that waits at a log's end would hold up the next partition."""
_BATCH_MAX = 500
_IDLE_POLLS_MAX = 60
_REQUEST_BYTES_SPARE = 65_536


class NotACopy(HeadraceError):
    """The target holds something that is not on the source."""


@dataclass(frozen=True, slots=True)
class Row:
    """A record, apart from where it is."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as a bus has it."""

    name: str
    partitions: int
    config: Mapping[str, str]

    @property
    def is_table(self) -> bool:
        return "compact" in self.config["cleanup.policy"]


def row_of(record: ConsumerRecord) -> Row:
    return Row(record.key, record.value, tuple(record.headers), record.timestamp)


class Side:
    """An open connection; `opened` makes one. One reading at a time."""

    def __init__(self, bus: str, admin: AIOKafkaAdminClient, reader: AIOKafkaConsumer, stack: AsyncExitStack) -> None:
        self.bus = bus
        self.admin = admin
        self._reader = reader
        self._stack = stack
        self._producer: AIOKafkaProducer | None = None

    async def topics(self) -> dict[str, Topic]:
        """Every topic that is not the bus's own, by name."""
        names = sorted(name for name in await self.admin.list_topics() if not name.startswith("__"))
        described = await self.admin.describe_topics(names) if names else []
        counts = {one["topic"]: len(one["partitions"]) for one in described}
        return {name: Topic(name, counts[name], await self._config(name)) for name in names}

    async def _config(self, topic: str) -> dict[str, str]:
        from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

        wanted = ConfigResource(ConfigResourceType.TOPIC, topic, dict.fromkeys(CONFIG))
        (response,) = await self.admin.describe_configs([wanted])
        return {entry[0]: entry[1] for resource in response.resources for entry in resource[4] if entry[0] in CONFIG}

    async def create(self, topics: Iterable[Topic], replication: int) -> None:
        """Raises `UsageError` when the bus does not take one of them."""
        from aiokafka.admin import NewTopic

        new = [NewTopic(one.name, one.partitions, replication, topic_configs=dict(one.config)) for one in topics]
        if not new:
            return
        response = await self.admin.create_topics(new)
        for name, code, message, *_ in response.topic_errors:
            if code:
                raise UsageError(f"{self.bus} does not take topic {name}: {message or f'error {code}'}")
        async with asyncio.timeout(30):
            while True:
                if await self._led([one.name for one in new]):
                    return
                await asyncio.sleep(0.1)

    async def _led(self, names: Sequence[str]) -> bool:
        described = await self.admin.describe_topics(list(names))
        return all(
            one["error_code"] == 0 and all(partition["leader"] >= 0 for partition in one["partitions"])
            for one in described
        )

    async def bounds(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Where each partition begins and ends now."""
        if not places:
            return {}
        first, last = await self._reader.beginning_offsets(places), await self._reader.end_offsets(places)
        return {place: (first[place], last[place]) for place in places}

    async def read(self, place: TopicPartition, start: int, end: int) -> AsyncGenerator[tuple[int, Row], None]:
        """The committed records between two offsets, with theirs. Raises `Unreachable` when they stop coming."""
        if start >= end:
            return
        self._reader.assign([place])
        self._reader.seek(place, start)
        idle = 0
        while await self._reader.position(place) < end:
            batches = await self._reader.getmany(place, timeout_ms=_POLL_MS, max_records=_BATCH_MAX)
            idle = 0 if batches else idle + 1
            if idle > _IDLE_POLLS_MAX:
                raise Unreachable(f"{self.bus} has stopped sending {place.topic}[{place.partition}]")
            for record in batches.get(place, []):
                if record.offset < end:
                    yield record.offset, row_of(record)

    async def open_producer(self, *, largest: int, batch: int) -> None:
        """Once, before the first `append`. `largest` record and usual `batch`, in bytes: every topic has a bound."""
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

    async def append(self, place: TopicPartition, rows: Sequence[Row], at: int | None) -> None:
        """Write `rows` and wait for them. `at`: the offset that the first must get; None when it does not matter.

        Raises `NotACopy` when somebody else writes there too.
        """
        assert self._producer is not None
        acks = [
            await self._producer.send(
                place.topic, row.value, row.key, place.partition, row.timestamp_ms, list(row.headers)
            )
            for row in rows
        ]
        for number, metadata in enumerate(await asyncio.gather(*acks)):
            if at is not None:
                self._check_offset(place, metadata.offset, at + number)

    async def append_repeated(self, place: TopicPartition, row: Row, count: int, at: int) -> None:
        """Write one small row without headers `count` times, as `append` does."""
        assert self._producer is not None
        acks = []
        while count:
            batch = self._producer.create_batch()
            size = 0
            while size < count and batch.append(key=row.key, value=row.value, timestamp=row.timestamp_ms) is not None:
                size += 1
            acks.append((at, await self._producer.send_batch(batch, place.topic, partition=place.partition)))
            at, count = at + size, count - size
        for expected, ack in acks:
            self._check_offset(place, (await ack).offset, expected)

    def _check_offset(self, place: TopicPartition, found: int, expected: int) -> None:
        if found != expected:
            raise NotACopy(
                f"{place.topic}[{place.partition}] on {self.bus}: a record came to lie at {found} instead of "
                f"{expected}; somebody else writes there. Stop it, delete the topic there, and mirror again"
            )

    async def commit(self, group: str, positions: Mapping[TopicPartition, tuple[int, str]]) -> None:
        """Set where `group` goes on. Raises `NotACopy` when it has members there."""
        from aiokafka import AIOKafkaConsumer
        from aiokafka.errors import CommitFailedError, UnknownMemberIdError

        consumer = AIOKafkaConsumer(**client_options(self.bus), group_id=group, enable_auto_commit=False)
        try:
            await consumer.start()
            consumer.assign(list(positions))
            await consumer.commit(dict(positions))
        except (CommitFailedError, UnknownMemberIdError) as error:
            raise NotACopy(f"group {group} has members on {self.bus}: stop the services there first") from error
        finally:
            await consumer.stop()

    async def delete_before(self, place: TopicPartition, offset: int) -> None:
        """Let the log begin at `offset`. Raises `UsageError` where the bus cannot."""
        from aiokafka.admin import RecordsToDelete
        from aiokafka.errors import KafkaError

        try:
            await self.admin.delete_records({place: RecordsToDelete(before_offset=offset)})
        except (KafkaError, NotImplementedError) as error:
            raise UsageError(
                f"{place.topic}[{place.partition}] begins at {offset} and has to begin there on {self.bus} too, which "
                f"does not delete records ({error!r}); mirror with the right to delete records there"
            ) from error


@asynccontextmanager
async def opened(bus: str) -> AsyncIterator[Side]:
    """A connection to the bus at `bus`. Raises `Unreachable`, `UsageError` without the extra."""
    try:
        from aiokafka import AIOKafkaConsumer
        from aiokafka.admin import AIOKafkaAdminClient
        from aiokafka.errors import KafkaError, MessageSizeTooLargeError
    except ImportError:
        raise UsageError("mirroring needs the extra: pip install 'headrace[topics]'") from None
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
            raise Unreachable(f"bus {bus}: {error!r}; run the same again to go on where this ended") from error
