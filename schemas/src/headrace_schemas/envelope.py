"""CloudEvents 1.0 in Kafka's binary mode: attributes in headers, the bare event as value, a W3C trace beside them.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from headrace_schemas.base import Event

Headers = tuple[tuple[str, bytes], ...]
_OFFSET = re.compile(r"^[0-9]{1,18}$")
_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
_HEADER_BYTES_MAX = 1024
OWN_SOURCE = "headrace/"
"""What the sources of Headrace's own services begin with."""
DATAREF_HEADER = "ce_dataref"
"""Beside a value that is a `BlobRef` and stands for the event (the CloudEvents claim check)."""
SEQUENCE_HEADER = "ce_sequence"
"""The first offset of a record that was put back after a retry, so that it keeps its place in the order."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The attributes of one event on the wire. `traceparent` and `dataref` are optional."""

    id: str
    type: str
    source: str
    time: datetime
    subject: str
    traceparent: str | None = None
    dataref: str | None = None
    """See `DATAREF_HEADER`."""
    after: Mapping[str, int] | None = None
    """Topic to the end offset of the partition with the event's number, read before the event was sent. Every record
    that was acknowledged before has a lower offset; every record that was sent later has a higher one."""
    sequence: int | None = None
    """See `SEQUENCE_HEADER`."""

    @classmethod
    def of(
        cls,
        event: Event,
        source: str,
        traceparent: str | None = None,
        dataref: str | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Envelope:
        return cls(event.event_id, event.type, source, event.time, event.subject, traceparent, dataref, after)

    def headers(self) -> Headers:
        pairs = {
            "ce_specversion": "1.0",
            "ce_id": self.id,
            "ce_type": self.type,
            "ce_source": self.source,
            "ce_time": self.time.isoformat().replace("+00:00", "Z"),
            "ce_subject": self.subject,
            "content-type": "application/json",
            "traceparent": self.traceparent,
            DATAREF_HEADER: self.dataref,
            "ce_after": ",".join(f"{topic}={end}" for topic, end in self.after.items()) if self.after else None,
            SEQUENCE_HEADER: None if self.sequence is None else str(self.sequence),
        }
        return tuple((name, text.encode()) for name, text in pairs.items() if text is not None)

    @classmethod
    def read(cls, headers: Iterable[tuple[str, bytes | None]], event: Event) -> Envelope:
        """The envelope that came with `event`; what a producer left out is derived from the event itself.

        Producing with nothing but a key and a value (kcat, a shell script) is legal.
        """
        texts = {name: _text(value) for name, value in headers if value is not None}
        return cls(
            id=event.event_id,  # another producer's `ce_id` could equal that of a later event, which would be dropped
            type=event.type,
            source=texts.get("ce_source") or "unknown",
            time=event.time,
            subject=texts.get("ce_subject") or event.subject,
            traceparent=_trace(texts.get("traceparent")),
            dataref=texts.get(DATAREF_HEADER),
            after=_after(texts.get("ce_after")),
            sequence=_number(texts.get(SEQUENCE_HEADER)),
        )


def _text(value: bytes) -> str:
    return value[:_HEADER_BYTES_MAX].decode("utf-8", "replace")


def _trace(value: str | None) -> str | None:
    return value if value and _TRACEPARENT.match(value) else None


def _after(value: str | None) -> Mapping[str, int] | None:
    """None also for what is no such list: it is then as if it had not been sent."""
    pairs = [part.partition("=") for part in (value or "").split(",")]
    found = {topic: _number(end) for topic, _, end in pairs}
    known = {topic: end for topic, end in found.items() if end is not None}
    return known if len(known) == len(pairs) else None


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and _OFFSET.match(value) else None


def type_of(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    """The `ce_type` of a raw record, None when the producer sent none."""
    return next((_text(value) for name, value in headers if name == "ce_type" and value is not None), None)


def is_own(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Whether a raw record says that a service of Headrace sent it."""
    source = next((value for name, value in headers if name == "ce_source" and value is not None), b"")
    return source.startswith(OWN_SOURCE.encode())


def sequence_of(headers: Iterable[tuple[str, bytes | None]]) -> int | None:
    """The offset that a raw record had first, None when it was not put back."""
    return next((_number(_text(value)) for name, value in headers if name == SEQUENCE_HEADER and value), None)


def refers(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Whether the value of a raw record only refers to its event."""
    return any(name == DATAREF_HEADER for name, _ in headers)
