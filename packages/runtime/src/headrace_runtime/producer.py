"""Sends events and waits until all replicas of the bus have acknowledged them. The producer is idempotent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError, MessageSizeTooLargeError

from headrace_runtime.blobs import BlobStore
from headrace_runtime.bus_client import client_options
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.settings import BusSettings
from headrace_runtime.wire import Outgoing, encode
from headrace_schemas import Event

_AT_A_TIME = 8
"""Records after which others get their turn: aiokafka only queues, and many in a row would hold up everybody."""


class EventProducer:
    """One connection to the bus. `send` returns when the record is durable; many may wait at once.

    `source` goes to `ce_source`, e.g. `headrace/gateway`. Start before use, stop at the end; stopping flushes.
    """

    def __init__(self, settings: BusSettings, source: str, blobs: BlobStore) -> None:
        self._settings = settings
        self._source = source
        self._blobs = blobs
        self._producer: AIOKafkaProducer | None = None

    @property
    def source(self) -> str:
        """`ce_source` of what it sends."""
        return self._source

    async def start(self) -> None:
        """Raises `Unavailable` when the bus does not answer."""
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
        if self._producer is not None:
            await self._producer.stop()
            self._producer = None

    async def abandon(self) -> None:
        """Stop without sending what is held back: nothing leaves this process any more.

        aiokafka has no public way to; ending its sender first leaves `stop` nothing to flush.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        sending: asyncio.Task[None] | None = producer._sender.sender_task
        if sending is not None:
            sending.cancel()
            await asyncio.wait([sending])
        producer._message_accumulator.fail_all(KafkaConnectionError("given up"))
        await producer.stop()

    async def encode(
        self, event: Event, partition: int | None = None, *, after: Mapping[str, int] | None = None
    ) -> Outgoing:
        return await encode(event, self._source, self._blobs, partition=partition, after=after)

    async def send(self, event: Event) -> None:
        """Raises `Unavailable` when the bus did not take it in time; it may then have been taken all the same."""
        await self.send_raw([await self.encode(event)])

    async def send_raw(self, records: Iterable[Outgoing]) -> None:
        """Send all, in order per partition, and wait for every acknowledgement. Raises as `send` does."""
        if self._producer is None:
            raise Unavailable("the producer is not started")
        try:
            acks = []
            for number, record in enumerate(records, 1):
                place = (record.topic, record.value, record.key, record.partition)
                acks.append(await self._producer.send(*place, headers=list(record.headers)))
                if number % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*acks)
        except MessageSizeTooLargeError as error:
            raise InvalidEvent("too_large", f"a record is larger than the bus takes: {error}") from error
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._settings.address}: {error!r}") from error

    async def partitions(self, topic: str) -> set[int]:
        """The topic's partitions as the bus has them."""
        if self._producer is None:
            raise Unavailable("the producer is not started")
        try:
            found: set[int] = await self._producer.partitions_for(topic)
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._settings.address}: {error!r}") from error
        return found
