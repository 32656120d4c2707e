"""Publish records to the bus. Needs the extra `headrace-client[topics]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.bus_access import client_options, unreachable
from headrace.errors import UsageError
from headrace_schemas import Event
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

Headers = tuple[tuple[str, bytes | None], ...]
REQUEST_BYTES_MAX = 1_048_576


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to publish. If `partition` is None, the key selects it (murmur2, as in Kafka's own clients)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None

    @classmethod
    def of(cls, event: Event, source: str) -> Outgoing:
        """Return the record of an event.

        Raises:
            UsageError: the event is too large for a topic. Only services may store payloads in the blob store.
        """
        value = event.to_json()
        if len(value) > PAYLOAD_BYTES_MAX:
            raise UsageError(
                f"{event.type}: {len(value)} bytes; must be at most {PAYLOAD_BYTES_MAX} to be published on a topic"
            )
        return cls(event.topic, event.key.encode(), value, Envelope.of(event, source).headers())


class Producer:
    """An open connection for publishing. `producing` creates it."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def send(self, records: Iterable[Outgoing]) -> None:
        """Publish records, in order within each partition, and return once all are acknowledged as durable."""
        acks = [
            await self._producer.send(
                record.topic, record.value, record.key, record.partition, headers=list(record.headers)
            )
            for record in records
        ]
        await asyncio.gather(*acks)


@asynccontextmanager
async def producing(bus: str, client_id: str = "headrace") -> AsyncIterator[Producer]:
    """Open a producer on the bus at `bus`. It is idempotent: retries never duplicate a record.

    Raises:
        Unreachable: the bus does not answer.
        UsageError: the extra `headrace-client[topics]` is not installed.
    """
    try:
        from aiokafka import AIOKafkaProducer
        from aiokafka.errors import KafkaError
    except ImportError:
        raise UsageError("writing to topics needs the extra: pip install 'headrace-client[topics]'") from None
    producer = AIOKafkaProducer(
        **client_options(bus),
        client_id=client_id,
        acks="all",
        enable_idempotence=True,
        max_request_size=REQUEST_BYTES_MAX,
    )
    try:
        await producer.start()
        yield Producer(producer)
    except (KafkaError, OSError) as error:
        raise await unreachable(bus, error) from error
    finally:
        await producer.stop()
