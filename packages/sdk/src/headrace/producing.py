"""Writes to the bus. Needs the extra `headrace[topics]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.bus_access import client_options, unreachable
from headrace.errors import UsageError
from headrace_schemas import Event
from headrace_schemas.blobs import PAYLOAD_BYTES_MAX
from headrace_schemas.envelope import Envelope

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

Headers = tuple[tuple[str, bytes | None], ...]
REQUEST_BYTES_MAX = 1_048_576


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to send. With `partition` None the key chooses it (murmur2, as Kafka's own clients)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None

    @classmethod
    def of(cls, event: Event, source: str) -> Outgoing:
        """Raises `UsageError` for an event that is too large for a topic: only services may use the blob store."""
        value = event.to_json()
        if len(value) > PAYLOAD_BYTES_MAX:
            raise UsageError(f"{event.type}: {len(value)} bytes; at most {PAYLOAD_BYTES_MAX} travel on a topic")
        return cls(event.topic, event.key.encode(), value, Envelope.of(event, source).headers())


class Producer:
    """An open connection; `producing` makes one."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def send(self, records: Iterable[Outgoing]) -> None:
        """Send all, in order per partition; returns once all of them are durable."""
        acks = [
            await self._producer.send(one.topic, one.value, one.key, one.partition, headers=list(one.headers))
            for one in records
        ]
        await asyncio.gather(*acks)


@asynccontextmanager
async def producing(bus: str, client_id: str = "headrace") -> AsyncIterator[Producer]:
    """A connection to the bus at `bus` that repeats what was not acknowledged and never doubles it.

    Raises `Unreachable`, `UsageError` without the extra.
    """
    try:
        from aiokafka import AIOKafkaProducer
        from aiokafka.errors import KafkaError
    except ImportError:
        raise UsageError("writing to topics needs the extra: pip install 'headrace[topics]'") from None
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
