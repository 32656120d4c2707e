"""Content of a record: an event, or a reference to it."""

from __future__ import annotations

import hashlib

import pytest

from headrace_schemas import Feedback
from headrace_schemas.events.envelope import SEQUENCE_HEADER, parse_record, sequence_of
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.errors import InvalidEvent

REF = BlobRef(uri="file:///x", sha256=hashlib.sha256(b"data").hexdigest(), size=4)


def test_an_event_or_a_reference() -> None:
    assert parse_record("feedback", b"{}", ()) == (Feedback, b"{}")
    assert parse_record("feedback", REF.model_dump_json().encode(), [("ce_dataref", None)]) == (Feedback, REF)


@pytest.mark.parametrize(
    ("topic", "value", "headers", "reason"),
    [
        ("nonsense", b"{}", (), "unknown_topic"),
        ("feedback", None, (), "empty_value"),
        ("feedback", b"{}", (("ce_dataref", b"x"),), "invalid_blob_reference"),
    ],
)
def test_what_carries_none_has_a_reason(
    topic: str, value: bytes | None, headers: tuple[tuple[str, bytes | None], ...], reason: str
) -> None:
    with pytest.raises(InvalidEvent) as refusal:
        parse_record(topic, value, headers)
    assert refusal.value.reason == reason


def test_a_reference_matches_its_bytes_alone() -> None:
    assert REF.matches(b"data")
    assert not REF.matches(b"date")
    assert not REF.model_copy(update={"size": 5}).matches(b"data")


@pytest.mark.parametrize(
    ("text", "expected"), [(b"17", 17), (b"", None), (b"-1", None), (None, None), (b"9" * 19, None)]
)
def test_the_first_offset_is_a_number_or_none(text: bytes | None, expected: int | None) -> None:
    assert sequence_of([("other", b"3"), (SEQUENCE_HEADER, text)]) == expected
