"""Tests of dead letters, of consumers that refuse too many records, and of damaged batches.

Services without the stream host write one letter for each record. Such a consumer pauses when it refuses nearly all
records, and resumes on request. A damaged batch becomes one marked record, and the records around it are read.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka import damage
from headrace_runtime.kafka.dead_letters import DeadLetterSender, dead_letter
from headrace_runtime.kafka.wire import Record, decode
from headrace_runtime.settings.sections import RefusalBounds
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.files import NameFile
from headrace_runtime.stream.pausing import DeadLetterLimiter, RefusalLimit
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
    sent = NameFile(path)
    for number in range(10_001):
        sent.add(f"letter-{number}")
    again = NameFile(path)
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


def record(offset: int) -> Record:
    return Record("experiences", 0, offset, None, b"{")


async def test_it_pauses_after_so_many_in_a_row_and_loses_none() -> None:
    sent: list[int] = []

    async def send(refused: Record, _error: InvalidEvent) -> None:
        sent.append(refused.offset)

    refusing = DeadLetterLimiter("test", send, RefusalBounds(run_max=3))
    for offset in range(3):
        await refusing(record(offset), InvalidEvent("invalid_event", "{"))
    waiting = asyncio.create_task(refusing(record(3), InvalidEvent("invalid_event", "{")))
    await asyncio.sleep(0)
    assert refusing.paused is not None
    assert "3 records in a row" in refusing.paused
    assert sent == [0, 1, 2]
    refusing.resume()
    await waiting
    assert sent == [0, 1, 2, 3]
    assert refusing.paused is None


async def test_what_is_handled_in_between_counts() -> None:
    async def send(_refused: Record, _error: InvalidEvent) -> None:
        pass

    refusing = DeadLetterLimiter("test", send, RefusalBounds(run_max=1))
    for offset in range(5):
        await refusing(record(offset), InvalidEvent("invalid_event", "{"))
        refusing.note_handled()
    assert refusing.paused is None


def test_a_run_of_refusals_is_cut_at_its_bound() -> None:
    limit = RefusalLimit(RefusalBounds(run_max=3))
    assert limit.admits([True] * 5) == 3
    limit.note([True] * 3)
    assert limit.admits([True]) == 0
    assert limit.admits([False, True, True]) == 3, "a good record ends the run"


def test_a_share_is_looked_at_once_there_were_enough() -> None:
    limit = RefusalLimit(RefusalBounds(run_max=0, share_max=0.5, window=10))
    limit.note([True, False] * 4)
    assert limit.reason is None
    assert limit.admits([True, True, True]) == 1, "the tenth would make six of ten"


def test_after_a_reset_it_counts_anew() -> None:
    limit = RefusalLimit(RefusalBounds(run_max=1))
    limit.note([True, True])
    assert limit.reason is not None
    limit.reset()
    assert limit.admits([True]) == 1


_VALUES = 3
_BATCHES = 4


def _batch(first: int) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, 0, 1, 0, 0, 10_000)
    for number in range(_VALUES):
        builder.append(number, timestamp=1, key=b"k", value=b"value %d" % (first + number), headers=[])
    data = bytearray(builder.build())
    data[0:8] = first.to_bytes(8, "big")
    return bytes(data)


def _read(data: bytes) -> dict[int, object]:
    """Return the value of each record by offset, or `damaged`."""
    unpacked = damage.Unpacked(TopicPartition("t", 0), damage.Batches(data), [], 0, None, None, True, 0)
    records: dict[int, object] = {}
    for record in unpacked:
        records[record.offset] = "damaged" if dict(record.headers).get(damage.HEADER) else record.value
    return records


def test_whole_batches_are_read_as_ever() -> None:
    data = b"".join(_batch(first) for first in range(0, 12, 3))
    assert _read(data) == {number: b"value %d" % number for number in range(12)}


def test_a_damaged_batch_costs_its_own_records_only() -> None:
    parts = [bytearray(_batch(first)) for first in range(0, 12, 3)]
    parts[1][-2] ^= 1
    records = _read(b"".join(parts))
    assert records == {n: b"value %d" % n for n in (0, 1, 2, 6, 7, 8, 9, 10, 11)} | {3: "damaged"}


def test_no_flipped_byte_is_silent() -> None:
    """The base offset and the leader epoch are not covered by the checksum; the broker sets and protects them."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        parts = [bytearray(_batch(first)) for first in range(0, _BATCHES * _VALUES, _VALUES)]
        hit = rng.randrange(_BATCHES)
        parts[hit][rng.randrange(17, len(parts[hit]))] ^= 1 << rng.randrange(8)
        records = _read(b"".join(parts))
        assert "damaged" in records.values() or hit == _BATCHES - 1
        for offset, value in records.items():
            assert value in ("damaged", b"value %d" % offset)
        for offset in range(hit * _VALUES):
            assert records[offset] == b"value %d" % offset, "what is before it is there"


def test_an_answer_that_is_no_batch_passes_one_offset() -> None:
    assert _read(b"the broker answers CORRUPT_MESSAGE") == {0: "damaged"}


async def test_what_is_damaged_is_refused_with_its_offsets(tmp_path: object) -> None:
    record = Record("turns", 0, 3, None, b"x", ((damage.HEADER, b"offsets 3 to 5: its checksum"),))
    with pytest.raises(InvalidEvent, match="offsets 3 to 5") as refused:
        await decode(record, BlobStore(f"file://{tmp_path}"))
    assert refused.value.reason == "damaged_record"
