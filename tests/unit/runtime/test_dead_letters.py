"""Content of a dead letter, and one letter per record in services without the stream host."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.dead_letters import DeadLetterSender, SentDeadLetters, dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter
from tests.support.streams import MemoryProducer

ERROR = InvalidEvent("invalid_event", "nothing in it is right")


def letter(record: Record, event_id: str | None = None) -> DeadLetter:
    return dead_letter("test", record, "broken", "x" * 5000, event_id=event_id)


def test_it_holds_the_whole_record() -> None:
    headers = (("ce_id", b"from-header"), ("none", None), ("bytes", b"\xff"))
    dead_letter = letter(Record("turns", 0, 0, b"key", b"value", headers))
    assert (dead_letter.source_topic, dead_letter.source_partition, dead_letter.source_offset) == ("turns", 0, 0)
    assert (dead_letter.source_key, dead_letter.value, dead_letter.attempts) == ("key", b"value", 1)
    assert dead_letter.headers == {"ce_id": "from-header", "none": "", "bytes": "ÿ"}
    assert len(dead_letter.error) == 4096


def test_a_record_that_never_had_a_place_has_none() -> None:
    dead_letter = letter(Record("turns", -1, -1, b"", None))
    assert (dead_letter.source_partition, dead_letter.source_offset, dead_letter.source_key) == (None, None, None)
    assert dead_letter.value == b""


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
    dead_letter = letter(Record("turns", 0, 0, b"k" * 600, b"value", headers))
    assert dead_letter.source_key == "k" * 512
    assert list(dead_letter.headers) == [f"h{number}" for number in range(64)]


@pytest.mark.parametrize("key", [b"\xff\xfe", "müller".encode("latin-1"), b"k\x00", b"\xed\xa0\x80"], ids=range(4))
def test_a_key_that_a_retry_cannot_restore_is_marked(key: bytes) -> None:
    assert "\ufffd" in (letter(Record("turns", 0, 0, key, b"{}", ())).source_key or "")


def test_the_newest_ten_thousand_ids_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "refused"
    sent = SentDeadLetters(path)
    for number in range(10_001):
        sent.add(f"letter-{number}")
    again = SentDeadLetters(path)
    assert ["letter-0" in again, "letter-1" in again, "letter-10000" in again] == [False, True, True]
    assert len(path.read_text().split()) == 10_000, "the file has not grown for ever"


async def test_a_refusal_is_told_once_also_after_a_restart(tmp_path: Path) -> None:
    record = Record("turns", 0, 7, b"key", b"{")
    for expected in (1, 0):
        producer = MemoryProducer(BlobStore(tmp_path.as_uri()))
        refusals = DeadLetterSender("test", producer, tmp_path)
        for _ in range(2):
            await refusals(record, ERROR)
        assert len(producer.records) == expected


async def test_without_a_folder_every_refusal_is_told(tmp_path: Path) -> None:
    producer = MemoryProducer(BlobStore(tmp_path.as_uri()))
    refusals = DeadLetterSender("test", producer)
    for _ in range(2):
        await refusals(Record("turns", 0, 7, b"key", b"{"), ERROR)
    letters = [DeadLetter.from_json(record.value or b"") for record in producer.records]
    assert [(sent_letter.reason, sent_letter.source_offset) for sent_letter in letters] == [("invalid_event", 7)] * 2
