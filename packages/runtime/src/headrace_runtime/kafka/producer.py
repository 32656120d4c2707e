"""Idempotent producer of events, which waits until all in-sync replicas of the bus have acknowledged a record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError, MessageSizeTooLargeError

from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.topics import client_options
from headrace_runtime.kafka.wire import Outgoing, encode
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event

log = get_logger(__name__)

_ABANDON_TIMEOUT_S = 1.0
_AT_A_TIME = 8
"""Number of records that are queued before other tasks run. aiokafka only queues a record, so many records would block
the event loop."""


class EventProducer:
    """Producer for the events of one service. `send` returns once the record is durable. Concurrent calls are possible.

    `source` is the `ce_source` of the events, for example `headrace/gateway`. Call `start` before use, and at the end
    `stop`, which sends the queued records.
    """

    def __init__(self, settings: BusSettings, source: str, blobs: BlobStore) -> None:
        self._settings = settings
        self._source = source
        self._blobs = blobs
        self._producer: AIOKafkaProducer | None = None

    @property
    def source(self) -> str:
        """Value of `ce_source` in the envelopes of the events."""
        return self._source

    async def start(self) -> None:
        """Connect. Raises `Unavailable` if the bus does not respond."""
        producer = AIOKafkaProducer(
            **client_options(self._settings),
            client_id=self._source,
            acks="all",
            enable_idempotence=True,
            compression_type=None if self._settings.compression == "none" else self._settings.compression,
            max_request_size=1_048_576,
            request_timeout_ms=int(self._settings.request_timeout_s * 1000),
        )
        try:
            await producer.start()
        except (KafkaError, OSError) as error:
            await producer.stop()
            raise Unavailable(f"bus {self._settings.address}: {error}") from error
        self._producer = producer

    async def stop(self) -> None:
        """Send all queued records, and disconnect.

        Records that the bus has not acknowledged within `request_timeout_s` are discarded, because an idempotent
        producer tries again without end.
        """
        if self._producer is None:
            return
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                await self._producer.flush()
        except TimeoutError:
            reason = "the bus has not acknowledged them in time"
            log.warning("records_discarded", bus=self._settings.address, reason=reason)
            await self.abandon()
        else:
            producer, self._producer = self._producer, None
            await producer.stop()

    async def abandon(self) -> None:
        """Disconnect, and discard the queued records.

        aiokafka has no public method for this. Cancelling its sender task first leaves no records that `stop` would
        send. The task waits for its requests, which end when the connections are closed.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        sending: asyncio.Task[None] | None = producer._sender.sender_task
        if sending is not None:
            sending.cancel()
            await producer.client.close()
            await asyncio.wait([sending], timeout=_ABANDON_TIMEOUT_S)
        producer._message_accumulator.fail_all(KafkaConnectionError("given up"))
        if sending is None or sending.done():
            await producer.stop()

    async def encode(
        self, event: Event, partition: int | None = None, *, after: Mapping[str, int] | None = None
    ) -> Outgoing:
        """Encode an event as a record without sending it. The arguments are those of `wire.encode`."""
        return await encode(event, self._source, self._blobs, partition=partition, after=after)

    async def send(self, event: Event) -> None:
        """Send an event. Raises `Unavailable` if no acknowledgement arrives in time; the record may have been stored
        nevertheless."""
        await self.send_raw([await self.encode(event)])

    async def send_raw(self, records: Iterable[Outgoing]) -> None:
        """Send records, in order within each partition, and wait for all acknowledgements. Raises as `send` does."""
        if self._producer is None:
            raise Unavailable("the producer is not started")
        try:
            acks = []
            for number, record in enumerate(records, 1):
                fields = (record.topic, record.value, record.key, record.partition)
                acks.append(await self._producer.send(*fields, headers=list(record.headers)))
                if number % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*acks)
        except MessageSizeTooLargeError as error:
            raise InvalidEvent("too_large", f"a record is larger than the bus accepts: {error}") from error
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._settings.address}: {error!r}") from error

    async def partitions(self, topic: str) -> set[int]:
        """Return the partition numbers of `topic`. Raises `Unavailable`."""
        if self._producer is None:
            raise Unavailable("the producer is not started")
        try:
            partitions: set[int] = await self._producer.partitions_for(topic)
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._settings.address}: {error!r}") from error
        return partitions
