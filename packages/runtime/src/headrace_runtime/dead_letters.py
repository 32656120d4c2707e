"""Builds the event for a record that was refused for good."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from headrace_runtime import whole_file
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import DEAD_LETTERS
from headrace_runtime.producer import EventProducer
from headrace_runtime.wire import Record
from headrace_schemas import DeadLetter
from headrace_schemas.base import utcnow
from headrace_schemas.names import decode_name
from headrace_schemas.text import storable

log = get_logger(__name__)
_HEADERS_MAX = 64
_ERROR_LENGTH_MAX = 4096
_NAME_LENGTH_MAX = 512
_HEADER_LENGTH_MAX = 65_536
_VALUE_BYTES_MAX = 1_572_864
"""Bytes of a value that its base64 may hold; the bus takes smaller records only."""
_TOLD_MAX = 10_000


def dead_letter(
    service: str, record: Record, reason: str, error: str, attempts: int = 1, event_id: str | None = None
) -> DeadLetter:
    """The whole record with its reason. Counts it and logs where it came from, never what it said.

    `event_id` is that of the event, when there is one in the record; else the producer's word is all that there is.
    Never raises: what a letter cannot hold is replaced or cut.
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


class Told:
    """Ids of dead letters that are durable, in a file: a table is read from its beginning at each start, and what was
    refused once would be refused again. The last few thousand are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="ascii", errors="replace").split() if path.exists() else []
        self._names = dict.fromkeys(lines[-_TOLD_MAX:])
        if len(lines) > _TOLD_MAX:
            whole_file.replace(path, "".join(f"{name}\n" for name in self._names).encode("ascii"))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Durable enough: what a power cut takes back is told once more."""
        self._names[name] = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"{name}\n")


class Refusals:
    """Sends dead letters for services that read the bus without the stream host. `folder` is the service's own."""

    def __init__(self, service: str, producer: EventProducer, folder: Path | None = None) -> None:
        self._service = service
        self._producer = producer
        self._told = Told(folder / "refused") if folder is not None else None

    async def __call__(self, record: Record, error: InvalidEvent) -> None:
        """Returns once the dead letter is durable. Raises `Unavailable` when the bus is away."""
        letter = dead_letter(self._service, record, error.reason, str(error))
        if self._told is not None and letter.event_id in self._told:
            return
        await self._producer.send(letter)
        if self._told is not None:
            self._told.add(letter.event_id)
