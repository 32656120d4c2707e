"""What a dead letter says of a record, and that services without the stream host tell each once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace_runtime.blobs import BlobStore
from headrace_runtime.dead_letters import Refusals, Told, dead_letter
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.wire import Record
from headrace_schemas import DeadLetter
from tests.support.streams import MemoryProducer

ERROR = InvalidEvent("invalid_event", "nothing in it is right")


def letter(record: Record, event_id: str | None = None) -> DeadLetter:
    return dead_letter("test", record, "broken", "x" * 5000, event_id=event_id)


def test_it_holds_the_whole_record() -> None:
    headers = (("ce_id", b"from-header"), ("none", None), ("bytes", b"\xff"))
    found = letter(Record("turns", 0, 0, b"key", b"value", headers))
    assert (found.source_topic, found.source_partition, found.source_offset) == ("turns", 0, 0)
    assert (found.source_key, found.value, found.attempts) == ("key", b"value", 1)
    assert found.headers == {"ce_id": "from-header", "none": "", "bytes": "ÿ"}
    assert len(found.error) == 4096


def test_a_record_that_never_had_a_place_has_none() -> None:
    found = letter(Record("turns", -1, -1, b"", None))
    assert (found.source_partition, found.source_offset, found.source_key) == (None, None, None)
    assert found.value == b""


@pytest.mark.parametrize(
    ("event_id", "header", "expected"),
    [
        ("from-event", b"from-header", "from-event"),
        (None, b"from-header", "from-header"),
        (None, b"h" * 600, "h" * 512),
        (None, b"", hashlib.sha256(b"value").hexdigest()),
    ],
)
def test_it_is_named_by_the_event_else_by_its_producer_else_by_its_bytes(
    event_id: str | None, header: bytes, expected: str
) -> None:
    assert letter(Record("turns", 0, 0, None, b"value", (("ce_id", header),)), event_id).source_id == expected


def test_long_keys_and_many_headers_are_cut() -> None:
    headers = tuple((f"h{number}", b"x") for number in range(100))
    found = letter(Record("turns", 0, 0, b"k" * 600, b"value", headers))
    assert found.source_key == "k" * 512
    assert list(found.headers) == [f"h{number}" for number in range(64)]


@pytest.mark.parametrize("key", [b"\xff\xfe", "müller".encode("latin-1"), b"k\x00", b"\xed\xa0\x80"], ids=range(4))
def test_a_key_that_a_retry_cannot_restore_is_marked(key: bytes) -> None:
    assert "\ufffd" in (letter(Record("turns", 0, 0, key, b"{}", ())).source_key or "")


def test_the_newest_ten_thousand_ids_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "refused"
    told = Told(path)
    for number in range(10_001):
        told.add(f"letter-{number}")
    again = Told(path)
    assert ["letter-0" in again, "letter-1" in again, "letter-10000" in again] == [False, True, True]
    assert len(path.read_text().split()) == 10_000, "the file has not grown for ever"


async def test_a_refusal_is_told_once_also_after_a_restart(tmp_path: Path) -> None:
    record = Record("turns", 0, 7, b"key", b"{")
    for expected in (1, 0):
        producer = MemoryProducer(BlobStore(tmp_path.as_uri()))
        refusals = Refusals("test", producer, tmp_path)
        for _ in range(2):
            await refusals(record, ERROR)
        assert len(producer.records) == expected


async def test_without_a_folder_every_refusal_is_told(tmp_path: Path) -> None:
    producer = MemoryProducer(BlobStore(tmp_path.as_uri()))
    refusals = Refusals("test", producer)
    for _ in range(2):
        await refusals(Record("turns", 0, 7, b"key", b"{"), ERROR)
    found = [DeadLetter.from_json(record.value or b"") for record in producer.records]
    assert [(one.reason, one.source_offset) for one in found] == [("invalid_event", 7)] * 2
