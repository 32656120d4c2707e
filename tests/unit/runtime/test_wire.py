"""Events to records and back, small and large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.wire import Outgoing, Record, decode, encode
from headrace_runtime.process import tracing
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Feedback
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX, BlobRef
from tests.support.loop_block import blocked


def damage(ref: BlobRef) -> None:
    Path(ref.uri.removeprefix("file://")).write_bytes(b"garbage")


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path.as_uri())


def feedback(comment: str = "fine") -> Feedback:
    return Feedback(time=utcnow(), feedback_id="f", session_key="a" * 16, value=1.0, comment=comment)


def as_record(sent: Outgoing) -> Record:
    return Record(sent.topic, 0, 7, sent.key, sent.value, sent.headers)


async def test_a_small_event_is_its_own_json(blobs: BlobStore) -> None:
    event = feedback()
    with tracing.span(None) as trace:
        sent = await encode(event, "headrace/test", blobs)
    assert sent.value == event.to_json()
    received = await decode(as_record(sent), blobs)
    assert received.event == event
    assert received.envelope.traceparent == trace
    assert received.envelope.source == "headrace/test"
    assert list(blobs.digests()) == []


async def test_a_large_event_travels_as_a_reference(blobs: BlobStore) -> None:
    event = feedback("x" * PAYLOAD_BYTES_MAX)
    sent = await encode(event, "headrace/test", blobs)
    assert sent.value is not None
    ref = BlobRef.model_validate_json(sent.value)
    assert ref.size > PAYLOAD_BYTES_MAX
    received = await decode(as_record(sent), blobs)
    assert received.event == event
    assert received.envelope.dataref == ref.uri


async def test_a_missing_blob_is_unavailable_and_a_corrupt_one_invalid(blobs: BlobStore) -> None:
    sent = await encode(feedback("x" * PAYLOAD_BYTES_MAX), "headrace/test", blobs)
    assert sent.value is not None
    ref = BlobRef.model_validate_json(sent.value)
    damage(ref)
    with pytest.raises(InvalidEvent) as refusal:
        await decode(as_record(sent), blobs)
    assert refusal.value.reason == "corrupt_blob"
    blobs.delete(ref)
    with pytest.raises(Unavailable):
        await decode(as_record(sent), blobs)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Record("feedback", 0, 0, b"k", None), "empty_value"),
        (Record("feedback", 0, 0, b"k", b"{"), "invalid_json"),
        (Record("feedback", 0, 0, b"k", b"{}"), "invalid_event"),
        (Record("nonsense", 0, 0, b"k", b"{}"), "unknown_topic"),
        (Record("feedback", 0, 0, b"k", b"{}", (("ce_dataref", b"x"),)), "invalid_blob_reference"),
    ],
)
async def test_poison_has_a_reason(blobs: BlobStore, record: Record, reason: str) -> None:
    with pytest.raises(InvalidEvent) as refusal:
        await decode(record, blobs)
    assert refusal.value.reason == reason


async def test_an_identifier_from_which_no_id_can_be_derived_is_poison(blobs: BlobStore) -> None:
    value = feedback().to_json().replace(b'"feedback_id":"f"', b'"feedback_id":"f\\u0000"')
    with pytest.raises(InvalidEvent) as refusal:
        await decode(Record("feedback", 0, 0, b"k", value), blobs)
    assert refusal.value.reason == "invalid_event"


async def test_a_record_full_of_values_is_parsed_beside_the_event_loop(blobs: BlobStore) -> None:
    context = {"x": [{"a": "b"}] * 8000}  # below the size from which values are in the blob store
    value = json.dumps(json.loads(feedback("x").to_json()) | {"context": context}).encode()
    assert len(value) < PAYLOAD_BYTES_MAX
    async with blocked() as block:
        for _ in range(3):
            await decode(Record("feedback", 0, 0, b"k", value, Envelope.of(feedback("x"), "outside").headers()), blobs)
    assert block.busy_s < 0.01
