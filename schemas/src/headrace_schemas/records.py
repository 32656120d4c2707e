"""From a record's bytes to its event: one reading for services, the SDK and the command."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from headrace_schemas.base import Event
from headrace_schemas.blobs import BlobRef
from headrace_schemas.by_topic import EVENTS
from headrace_schemas.envelope import refers
from headrace_schemas.errors import InvalidEvent


def carried(
    topic: str, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]
) -> tuple[type[Event], bytes | BlobRef]:
    """The type of the event in a record of `topic`, and its JSON or where that lies. Raises `InvalidEvent`."""
    model = EVENTS.get(topic)
    if model is None:
        raise InvalidEvent("unknown_topic", f"no event is defined for topic {topic}")
    if value is None:
        raise InvalidEvent("empty_value", f"{model.type}: the record has no value")
    if not refers(headers):
        return model, value
    try:
        return model, BlobRef.model_validate_json(value)
    except ValidationError:
        raise InvalidEvent(
            "invalid_blob_reference", f"{model.type}: ce_dataref is set but the value is no reference"
        ) from None
