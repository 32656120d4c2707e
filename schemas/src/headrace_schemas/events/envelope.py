"""Events as Kafka records: the class of each topic, the envelope in the headers, and the parsing of the value.

The envelope is CloudEvents 1.0 in Kafka's binary mode: attributes and the W3C trace context in headers, the event as
value. https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from headrace_schemas.events.checkpoint import Checkpoint, ModelEvent, TrainingMetrics
from headrace_schemas.events.dead_letter import DeadLetter, DeadLetterDecision
from headrace_schemas.events.feedback import Feedback, Reward, SessionEnd
from headrace_schemas.events.routing import Replica, Routing
from headrace_schemas.events.trajectory import Experience, Trajectory
from headrace_schemas.events.turn import Turn
from headrace_schemas.values.base import Event
from headrace_schemas.values.blobs import EVENT_BYTES_MAX, BlobRef
from headrace_schemas.values.errors import InvalidEvent

Headers = tuple[tuple[str, bytes], ...]
_OFFSET = re.compile(r"^[0-9]{1,18}$")
_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
_HEADER_BYTES_MAX = 1024
OWN_SOURCE = "headrace/"
"""Prefix of the CloudEvents source of Headrace's own services."""
DATAREF_HEADER = "ce_dataref"
"""Header of a record whose value is a `BlobRef` to the event (the CloudEvents claim check)."""
SEQUENCE_HEADER = "ce_sequence"
"""Header with the original offset of a record that a retry put back onto its topic. It preserves the record's order."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """CloudEvents attributes of one record."""

    id: str
    type: str
    source: str
    time: datetime
    subject: str
    traceparent: str | None = None
    dataref: str | None = None
    """The value of `DATAREF_HEADER`."""
    after: Mapping[str, int] | None = None
    """End offsets by topic, of the partition with the same number as the event's, read before the event was sent.
    Records that were acknowledged earlier have lower offsets, records that were sent later have higher ones."""
    sequence: int | None = None
    """The value of `SEQUENCE_HEADER`."""

    @classmethod
    def of(
        cls,
        event: Event,
        source: str,
        traceparent: str | None = None,
        dataref: str | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Envelope:
        """Return the envelope of `event`, which `source` sends."""
        return cls(event.event_id, event.type, source, event.time, event.subject, traceparent, dataref, after)

    def headers(self) -> Headers:
        """Return the headers of the record, without optional attributes that are not set."""
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
        """Return the envelope of a record of `event`. Missing headers are derived from the event.

        Producers may send records without headers (kcat, a shell script).
        """
        texts = {name: _text(value) for name, value in headers if value is not None}
        return cls(
            id=event.event_id,  # not `ce_id`: with the id of a later event it would make that one a duplicate
            type=event.type,
            source=texts.get("ce_source") or "unknown",
            time=event.time,
            subject=texts.get("ce_subject") or event.subject,
            traceparent=_trace(texts.get("traceparent")),
            dataref=texts.get(DATAREF_HEADER),
            after=_parse_after(texts.get("ce_after")),
            sequence=_number(texts.get(SEQUENCE_HEADER)),
        )


def _text(value: bytes) -> str:
    return value[:_HEADER_BYTES_MAX].decode("utf-8", "replace")


def _trace(value: str | None) -> str | None:
    return value if value and _TRACEPARENT.match(value) else None


def _parse_after(value: str | None) -> Mapping[str, int] | None:
    """Parse the header `ce_after`, a list like `topic=12,other=3`: end offsets that the event's producer had read.
    Return None if it is missing or malformed.
    """
    pairs = [part.partition("=") for part in (value or "").split(",")]
    offsets = {topic: _number(end) for topic, _, end in pairs}
    valid_offsets = {topic: end for topic, end in offsets.items() if end is not None}
    return valid_offsets if len(valid_offsets) == len(pairs) else None


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and _OFFSET.match(value) else None


def type_of(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    """Return the `ce_type` of a raw record, or None if the producer did not send it."""
    return next((_text(value) for name, value in headers if name == "ce_type" and value is not None), None)


def is_own(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether the `ce_source` of a raw record names a Headrace service."""
    source = next((value for name, value in headers if name == "ce_source" and value is not None), b"")
    return source.startswith(OWN_SOURCE.encode())


def sequence_of(headers: Iterable[tuple[str, bytes | None]]) -> int | None:
    """Return the original offset of a raw record that a retry put back, or None for all other records."""
    return next((_number(_text(value)) for name, value in headers if name == SEQUENCE_HEADER and value), None)


def is_blob_reference(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether a record with these headers contains only a reference (`BlobRef`) to a large event in the blob
    store, not the event itself.
    """
    return any(name == DATAREF_HEADER for name, _ in headers)


EVENTS: dict[str, type[Event]] = {
    event.topic: event
    for event in (
        Turn,
        Feedback,
        SessionEnd,
        Trajectory,
        Reward,
        Experience,
        Checkpoint,
        Routing,
        Replica,
        ModelEvent,
        TrainingMetrics,
        DeadLetter,
        DeadLetterDecision,
    )
}
"""Event class by topic. Each topic has exactly one."""


def parse_record(
    topic: str, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]
) -> tuple[type[Event], bytes | BlobRef]:
    """Return the event type of a record of `topic`, and either the event's JSON or the reference to it.

    Raises:
        InvalidEvent: the topic has no events, or the value is missing or an invalid reference.
    """
    model = EVENTS.get(topic)
    if model is None:
        raise InvalidEvent("unknown_topic", f"no event is defined for topic {topic}")
    if value is None:
        raise InvalidEvent("empty_value", f"{model.type}: the record has no value")
    if not is_blob_reference(headers):
        return model, value
    try:
        ref = BlobRef.model_validate_json(value)
    except ValidationError:
        raise InvalidEvent(
            "invalid_blob_reference", f"{model.type}: ce_dataref is set but the value is not a blob reference"
        ) from None
    if ref.size > EVENT_BYTES_MAX:
        text = f"{model.type}: the blob has {ref.size} bytes; an event has at most {EVENT_BYTES_MAX}, split the run"
        raise InvalidEvent("invalid_blob_reference", text)
    return model, ref
