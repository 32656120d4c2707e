"""Builds the event for a record that was refused for good."""

from __future__ import annotations

import base64
import hashlib

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import DEAD_LETTERS
from headrace_runtime.producer import EventProducer
from headrace_runtime.wire import Record
from headrace_schemas import DeadLetter
from headrace_schemas.base import utcnow

log = get_logger(__name__)
_HEADERS_MAX = 64
_ERROR_LENGTH_MAX = 4096


def dead_letter(service: str, record: Record, reason: str, error: str, attempts: int = 1) -> DeadLetter:
    """The whole record with its reason. Counts it and logs where it came from, never what it said."""
    value = record.value or b""
    headers = {name: (text or b"").decode("utf-8", "replace") for name, text in record.headers[:_HEADERS_MAX]}
    DEAD_LETTERS.labels(record.topic, reason).inc()
    log.warning(
        "dead_letter", topic=record.topic, partition=record.partition, offset=record.offset, reason=reason, error=error
    )
    return DeadLetter(
        time=utcnow(),
        service=service,
        source_topic=record.topic,
        source_partition=record.partition if record.partition >= 0 else None,
        source_offset=record.offset if record.offset >= 0 else None,
        source_id=headers.get("ce_id", "")[:512] or hashlib.sha256(value).hexdigest(),
        source_key=record.key.decode("utf-8", "replace")[:512] or None if record.key else None,
        headers=headers,
        value_base64=base64.b64encode(value).decode(),
        reason=reason,
        error=error[:_ERROR_LENGTH_MAX],
        attempts=attempts,
    )


class Refusals:
    """Sends dead letters for services that read the bus without the stream host."""

    def __init__(self, service: str, producer: EventProducer) -> None:
        self._service = service
        self._producer = producer

    async def __call__(self, record: Record, error: InvalidEvent) -> None:
        """Returns once the dead letter is durable. Raises `Unavailable` when the bus is away."""
        await self._producer.send(dead_letter(self._service, record, error.reason, str(error)))
