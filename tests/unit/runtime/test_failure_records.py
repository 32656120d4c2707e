"""Tests of dead letters, of damaged batches, of log lines without secrets, and of the health of reward sources.

Services without the stream host write one letter for each record. Such a consumer pauses when it refuses nearly all
records, and resumes on request. A damaged batch becomes one marked record, and the records around it are read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import structlog
from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.http import web
from headrace_runtime.http.web import Sources
from headrace_runtime.kafka import damage
from headrace_runtime.kafka.dead_letters import DeadLetterSender, dead_letter
from headrace_runtime.kafka.wire import Record, decode
from headrace_runtime.process import logs
from headrace_runtime.settings.sections import Common, LogSettings, RefusalBounds
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.disk import NameFile
from headrace_runtime.stream.pausing import DeadLetterLimiter, RefusalLimit
from headrace_schemas import DeadLetter
from headrace_schemas.http.registry_api import SourceList
from headrace_schemas.values.text import printable
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


@pytest.fixture
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, settings = root.handlers, root.level, structlog.get_config()
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**settings)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("shape", ["json", "console"])
def test_secrets_are_in_no_line(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = LogSettings.model_validate({"format": shape})
    logs.configure("test", settings, ["4711471147114711", "PLANTED"])
    log = structlog.stdlib.get_logger("ours")
    try:
        raise ValueError("postgresql://me:SHAPED@db/x: PLANTED")
    except ValueError as error:
        log.exception("failed", error=repr(error), settings={"key": 4711471147114711, "list": ["xPLANTEDx"]})
        logging.getLogger("theirs").exception("connect %s", "redis://me:SHAPED@host")
    log.info("counts", tokens=17, ratio=0.5, name=None)
    log_text = capsys.readouterr().err
    assert not any(secret in log_text for secret in ("PLANTED", "SHAPED", "4711471147114711"))
    assert log_text.count("(hidden)") >= 5
    assert "17" in log_text


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("shape", ["json", "console"])
def test_log_values_are_visible_and_bounded(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = 'a\x1b[2J\x9b31m\u202eb\n{"level": "forged"}\x00\ud800\u2028c'
    logs.configure("test", LogSettings.model_validate({"format": shape}))
    log = structlog.stdlib.get_logger("ours")
    try:
        raise ValueError(hostile)
    except ValueError:
        log.exception("failed " + hostile, value=hostile, mapping={hostile: [hostile]}, long="x" * 1_000_000)
        logging.getLogger("theirs").error("they send %s", hostile)
    written = capsys.readouterr().err
    own_colors = re.compile(r"\x1b\[[0-9;]*m") if shape == "console" else re.compile("$^")
    lines = own_colors.sub("", written)
    assert not [letter for letter in lines if letter != "\n" and printable(letter) != letter]
    assert not any(line.startswith('{"level": "forged"') for line in lines.splitlines() if shape == "json")
    assert len(lines) < 100_000


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))

    info = warning


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    recorder = Log()
    monkeypatch.setattr(web, "log", recorder)
    return recorder


def test_failures_are_counted_told_and_over_with_the_first_success(log: Log) -> None:
    sources = Sources()
    sources.expect(["function:a", "function:b"])
    for _ in range(150):
        sources.note("function:a", "failed", "KeyError: 'x'")
    sources.note("function:b", "abstained", None)
    a, b = sources.source_list().data
    assert (a.id, a.failing, a.outcomes, a.last_error) == ("function:a", 150, {"failed": 150}, "KeyError: 'x'")
    assert a.last_error_at is not None
    assert (b.failing, b.last_error) == (0, None)
    assert [fields["in_a_row"] for _, fields in log.lines] == [1, 10, 100]
    assert log.lines[0][1]["error"] == "KeyError: 'x'"
    sources.note("function:a", "scored", None)
    a = sources.source_list().data[0]
    assert (a.failing, a.last_error) == (0, "KeyError: 'x'"), "the last error stays to be read"
    assert log.lines[-1] == ("source_works_again", {"source": "function:a", "failed_in_a_row": 150})


def test_what_quotes_a_model_is_not_logged(log: Log) -> None:
    sources = Sources()
    sources.note("judge:a", "parse_error", "no verdict in: SECRET")
    assert log.lines[0][1]["error"] is None
    assert sources.source_list().data[0].last_error == "no verdict in: SECRET"


def test_sources_are_bounded() -> None:
    sources = Sources()
    for number in range(1000):
        sources.note(f"judge:{number}", "failed", "x" * 100_000)
    listed = sources.source_list().data
    assert len(listed) == 256
    assert listed[-1].id == "judge:999"
    assert len(listed[-1].last_error or "") == 2000


async def test_the_page_needs_the_internal_key() -> None:
    sources = Sources()
    sources.note("judge:a", "timed_out", None)
    application = web.app({}, [sources.route(Common.model_validate({"security": {"internal_key": "key"}}))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://scorer") as http:
        assert (await http.get("/sources")).status_code == 401
        answer = await http.get("/sources", headers={"Authorization": "Bearer key"})
    assert SourceList.model_validate_json(answer.content).data[0].last_error == "timed_out"
