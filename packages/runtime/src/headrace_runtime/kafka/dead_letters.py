"""Dead letters: events that contain records which a service has refused permanently, with the reason."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record
from headrace_runtime.metrics import DEAD_LETTERS
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.disk import NameFile
from headrace_schemas import DeadLetter
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.ids import decode_name
from headrace_schemas.values.text import storable

log = get_logger(__name__)
_HEADERS_MAX = 64
_ERROR_LENGTH_MAX = 4096
_NAME_LENGTH_MAX = 512
_HEADER_LENGTH_MAX = 65_536
_VALUE_BYTES_MAX = 1_572_864
"""Maximum number of bytes of a record's value in a dead letter, because the bus refuses larger records."""


@dataclass(frozen=True)
class RefusedRecord:
    """Record that will be dead-lettered, with the function that builds its dead letter."""

    record: Record
    tenant: str
    write: Callable[[], DeadLetter]

    @cached_property
    def letter(self) -> DeadLetter:
        """The dead letter. Building it at the first access counts and logs it once."""
        return self.write()


def dead_letter(
    service: str, record: Record, reason: str, error: str, attempts: int = 1, event_id: str | None = None
) -> DeadLetter:
    """Build the dead letter of a record, count it in the metrics, and log its position without its content.

    This never raises: content that does not fit a dead letter is replaced or cut.

    Args:
        service: the service that refuses the record.
        record: the record.
        reason: a short, stable identifier of the reason.
        error: the message about the problem.
        attempts: the number of tries.
        event_id: the id of the event in the record, if it is valid. Otherwise the header `ce_id` is used.
    """
    value = record.value or b""
    headers = {
        _text(name)[:_NAME_LENGTH_MAX]: _text(text or b"")[:_HEADER_LENGTH_MAX]
        for name, text in record.headers[:_HEADERS_MAX]
        if name
    }
    error = storable(error)[:_ERROR_LENGTH_MAX]
    key = storable((record.key or b"").decode("utf-8", "replace"))[:_NAME_LENGTH_MAX]  # a retry restores only UTF-8
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
        source_id=_text(event_id or headers.get("ce_id", ""))[:_NAME_LENGTH_MAX] or hashlib.sha256(value).hexdigest(),
        source_key=key or None,
        headers=headers,
        value_base64=base64.b64encode(value[:_VALUE_BYTES_MAX]).decode(),
        reason=reason,
        error=error,
        attempts=attempts,
    )


def _text(text: str | bytes) -> str:
    return storable(text if isinstance(text, str) else decode_name(text))


class DeadLetterSender:
    """Sender of dead letters for services that do not use Faust. `folder` is the service's folder, in which the ids of
    sent letters are stored."""

    def __init__(self, service: str, producer: EventProducer, folder: Path | None = None) -> None:
        self._service = service
        self._producer = producer
        self._sent = NameFile(folder / "refused") if folder is not None else None

    async def __call__(self, record: Record, error: InvalidEvent) -> None:
        """Send the dead letter of a record, unless it was sent before, and wait until it is durable. Raises
        `Unavailable`."""
        letter = dead_letter(self._service, record, error.reason, str(error))
        if self._sent is not None and letter.event_id in self._sent:
            return
        await self._producer.send(letter)
        if self._sent is not None:
            self._sent.add(letter.event_id)
