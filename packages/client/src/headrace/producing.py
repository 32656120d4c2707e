"""Publishing of records on the bus, and the connection options of Kafka clients. Needs the extra
`headrace-client[topics]`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import Unreachable, UsageError
from headrace_schemas import Event
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.http.stack_access import login_for
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer


def client_options(bus: str) -> dict[str, Any]:
    """Return the options with which an aiokafka client connects to the bus at `bus`.

    The login is taken from the environment (`HEADRACE_BUS__USERNAME`, `HEADRACE_BUS__PASSWORD`). For the bus of a stack
    in the data directory, it is the login of that stack.
    """
    login = login_for(bus)
    if login is None:
        return {"bootstrap_servers": bus}
    options: dict[str, Any] = {
        "bootstrap_servers": bus,
        "security_protocol": "SASL_SSL" if login.tls else "SASL_PLAINTEXT",
        "sasl_mechanism": login.mechanism,
        "sasl_plain_username": login.username,
        "sasl_plain_password": login.password,
    }
    if login.tls:
        from aiokafka.helpers import create_ssl_context

        options["ssl_context"] = create_ssl_context(cafile=login.ca_file or None)
    logging.getLogger("aiokafka.conn").addFilter(_is_not_plaintext_warning)
    return options


async def unreachable(bus: str, error: Exception) -> Unreachable:
    """Return an `Unreachable` error, with its likely cause, for a client that could not connect to the bus."""
    from aiokafka.conn import create_conn
    from aiokafka.errors import KafkaError

    options = client_options(bus)
    del options["bootstrap_servers"]
    host, _, port = bus.split(",")[0].strip().rpartition(":")
    if not options or not port.isdecimal():
        return Unreachable(f"bus {bus}: {error}; is it running, and does it need a login (HEADRACE_BUS__PASSWORD)?")
    try:
        connection = await create_conn(host.strip("[]"), int(port), request_timeout_ms=5000, **options)
        connection.close()
    except KafkaError as problem:
        name = type(problem).__name__
        if "sasl" in name.lower() or "authentication" in name.lower():
            user = options["sasl_plain_username"]
            remedy = "set HEADRACE_BUS__USERNAME and HEADRACE_BUS__PASSWORD to a login of this bus"
            return Unreachable(f"bus {bus} refuses the login of user {user!r} ({name}); {remedy}")
    except OSError:
        pass
    return Unreachable(f"bus {bus}: {error}; is it running?")


def _is_not_plaintext_warning(record: logging.LogRecord) -> bool:
    """Return False for aiokafka's warning about a login without TLS.

    The settings have chosen such a login, and aiokafka repeats the warning at each connection.
    """
    return "in the clear" not in str(record.msg)


Headers = tuple[tuple[str, bytes | None], ...]
REQUEST_BYTES_MAX = 1_048_576


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Record to publish. If `partition` is None, the key determines the partition (murmur2, as in Kafka's own
    clients)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None

    @classmethod
    def of(cls, event: Event, source: str) -> Outgoing:
        """Encode an event as a record.

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
    """Open connection for publishing records. `producing` creates it."""

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
    """Open a connection to the bus at `bus` for publishing records. Retries never duplicate a record, because the
    producer is idempotent.

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
