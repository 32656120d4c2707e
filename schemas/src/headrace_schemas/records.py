"""Parsing of a record's value, shared by the services, the SDK and the command."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from headrace_schemas.base import Event
from headrace_schemas.blobs import BlobRef
from headrace_schemas.by_topic import EVENTS
from headrace_schemas.envelope import is_blob_reference
from headrace_schemas.errors import InvalidEvent


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
        return model, BlobRef.model_validate_json(value)
    except ValidationError:
        raise InvalidEvent(
            "invalid_blob_reference", f"{model.type}: ce_dataref is set but the value is not a blob reference"
        ) from None
