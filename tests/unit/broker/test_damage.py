"""Tests of damaged broker files: one flipped byte is repaired, larger damage is removed and logged, the rest is
served."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.record.default_records import DefaultRecordBatch

from headrace_broker import page_sums, reads, wal_sums
from headrace_broker.errors import Damaged
from headrace_broker.reads import ReadRequest
from headrace_broker.store import Store
from headrace_broker.store_format import position
from headrace_broker.wal_sums import FileChecksums
from headrace_schemas import DeadLetter
from tests.support.presence import draw_seed
from tests.support.wire_client import batch
from tests.unit.broker.conftest import ALL, Harness, Run

SEED = draw_seed(__name__)
BATCHES = 60


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Harness, int]]:
    """Yield a broker and its partition, with batches of many sizes in both the database file and the write-ahead
    log."""
    monkeypatch.setattr(wal_sums, "WAL_PAGES", 60)
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    broker = Harness(tmp_path / "origin")
    (partition,) = broker.topic()
    for number in range(BATCHES):
        broker.put(partition, (b"k%d" % number, rng.randbytes(rng.choice((10, 500, 9_000)))))
        broker.store.record_commit(broker.db)
    yield broker, partition
    broker.close()


def _killed(broker: Harness, folder: Path) -> Path:
    """Return a copy of the folder in the state that kill -9 would leave."""
    shutil.copytree(broker.folder, folder)
    return folder


def _flip(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for at in offsets:
        data[at] ^= 0x41
    path.write_bytes(data)


def test_a_flipped_byte_anywhere_is_put_right(written: tuple[Harness, int], tmp_path: Path) -> None:
    folder = _killed(written[0], tmp_path / "copy")
    rng = random.Random(SEED)
    assert (folder / "broker.sqlite").stat().st_size > 20 * page_sums.PAGE_BYTES
    contents = {name: (folder / name).read_bytes() for name in ("broker.sqlite", "broker.sqlite-wal")}
    live = 32 + (page_sums.PAGE_BYTES + 24) * _frames(folder)
    for number in range(120):
        name = ("broker.sqlite", "broker.sqlite-wal")[number % 2]
        at = rng.randrange(32 if number < 20 else live if number % 2 else len(contents[name]))
        _flip(folder / name, at)
        check = FileChecksums(folder / "broker.sqlite")
        report = check.repair()
        check.close()
        assert (folder / name).read_bytes() == contents[name], f"{name} at {at}"
        assert len(report.repaired_pages) + len(report.repaired_frames) == 1
        assert not report.damaged_pages


def _frames(folder: Path) -> int:
    """Return the number of committed frames according to SQLite's index of the write-ahead log."""
    return int.from_bytes((folder / "broker.sqlite-shm").read_bytes()[16:20], "little")


@pytest.mark.parametrize("name", ["broker.sums", "broker.frames"])
def test_a_flipped_byte_in_the_checksums_changes_no_data(
    written: tuple[Harness, int], tmp_path: Path, name: str
) -> None:
    broker, partition = written
    folder = _killed(broker, tmp_path / "copy")
    rng = random.Random(SEED)
    for _ in range(20):
        _flip(folder / name, rng.randrange((folder / name).stat().st_size))
        check = FileChecksums(folder / "broker.sqlite")
        report = check.repair()
        check.close()
        assert not report.damaged_pages
    assert _rows(folder, partition) == _rows(broker.folder, partition)


def test_a_batch_beyond_repair_is_a_gap_with_a_name(written: tuple[Harness, int], tmp_path: Path) -> None:
    broker, partition = written
    broker.close()
    folder = _killed(broker, tmp_path / "copy")
    broker.open()
    path = folder / "broker.sqlite"
    with sqlite3.connect(path) as db:
        lengths = db.execute("SELECT position, length(payload) FROM batches").fetchall()
    victim = next(row_id for row_id, size in lengths if size > 9_000)
    data = path.read_bytes()
    at = data.index(_payload(path, victim)[-5_000:-4_500])
    _flip(path, at, at + 1, at + 2)
    store = Store(folder)
    offset = victim - position(partition, 0)
    assert [(lost.topic, lost.first_offset, lost.last_offset) for lost in store.lost] == [("t", offset, offset)]
    store.close()
    expected = [row for row in _rows(broker.folder, partition) if row[0] != victim]
    assert _rows(folder, partition) == expected
    again = Store(folder)
    assert again.lost == []  # reported once
    again.close()


def test_a_frame_beyond_repair_does_not_hide_those_behind_it(
    written: tuple[Harness, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, partition = written
    monkeypatch.setattr(wal_sums, "WAL_PAGES", 10_000)  # all of what is written now stays in the log
    for number in range(4):
        broker.put(partition, (b"large %d" % number, bytes([65 + number]) * 9_000))
        broker.store.record_commit(broker.db)
    folder = _killed(broker, tmp_path / "copy")
    log = folder / "broker.sqlite-wal"
    data = log.read_bytes()
    at = data.rindex(b"A" * 3_000)
    _flip(log, at, at + 1, at + 700)
    store = Store(folder)
    assert [(lost.first_offset, lost.last_offset) for lost in store.lost] == [(BATCHES, BATCHES)]
    store.close()
    assert len(_rows(folder, partition)) == BATCHES + 3


def test_a_file_whose_structure_is_broken_is_read_into_a_new_one(written: tuple[Harness, int], tmp_path: Path) -> None:
    broker, partition = written
    broker.close()
    folder = _killed(broker, tmp_path / "copy")
    broker.open()
    path = folder / "broker.sqlite"
    leaf = _leaf_of_batches(path)
    with path.open("r+b") as file:
        file.seek((leaf - 1) * page_sums.PAGE_BYTES)
        file.write(bytes(page_sums.PAGE_BYTES))
    store = Store(folder)
    lost = {offset for gap in store.lost for offset in range(gap.first_offset, gap.last_offset + 1)}
    store.close()
    readable_rows = _rows(folder, partition)
    assert lost
    assert readable_rows == [
        row for row in _rows(broker.folder, partition) if row[0] - position(partition, 0) not in lost
    ]
    assert list(folder.glob("broker.sqlite.damaged-*"))


def test_a_reader_serves_nothing_that_is_damaged(written: tuple[Harness, int]) -> None:
    broker, partition = written
    payload = broker.db.execute("SELECT payload FROM batches WHERE position = ?", (position(partition, 5),)).fetchone()
    changed = bytearray(payload[0])
    changed[-3] ^= 1
    broker.run(
        lambda: broker.db.execute(
            "UPDATE batches SET payload = ? WHERE position = ?", (bytes(changed), position(partition, 5))
        )
    )
    with pytest.raises(Damaged, match="offset 5"):
        reads.read_batches(broker.reader, [ReadRequest(partition, 0, BATCHES, ALL, False)], ALL)
    broker.store.note_damage()
    broker.restart()  # the next start
    assert [lost.first_offset for lost in broker.store.lost] == [5]
    assert [row.offset for row in broker.rows(partition)] == [n for n in range(BATCHES) if n != 5]


async def test_what_is_lost_has_a_dead_letter(run: Run, tmp_path: Path) -> None:
    async with run() as live:
        await live.create("t")
        await live.create("dead-letters")
        async with live.client() as client:
            for number in range(3):
                await client.produce("t", batch([(b"k", b"%d" % number)]))
    with sqlite3.connect(tmp_path / "broker.sqlite") as db:
        db.execute("UPDATE batches SET payload = zeroblob(70) WHERE last_offset = 1")
    (tmp_path / "broker.suspicion").touch()
    for name in ("broker.sums", "broker.frames"):
        (tmp_path / name).unlink()
    for _ in range(2):
        async with run() as live, live.client() as client:
            assert await client.base_offsets("t") == [0, 2]
            _, data = await client.fetch("dead-letters")
    (letter,) = [DeadLetter.from_json(bytes(entry.value)) for entry in DefaultRecordBatch(bytearray(data))]
    assert (letter.service, letter.source_topic, letter.source_offset) == ("broker", "t", 1)
    assert letter.reason == "damaged_on_disk"


def test_a_file_of_an_older_broker_is_taken_in(written: tuple[Harness, int]) -> None:
    broker, partition = written
    before = broker.rows(partition)
    broker.db.execute("ALTER TABLE transactions DROP COLUMN bumped_from")
    broker.db.execute("PRAGMA user_version = 1")
    broker.close()
    for name in ("broker.sums", "broker.frames"):
        (broker.folder / name).unlink()
    broker.open()
    assert broker.rows(partition) == before
    assert broker.store.lost == []
    broker.close()
    _flip(broker.folder / "broker.sqlite", 5_000)
    broker.open()
    assert broker.store.repaired == 1
    assert broker.rows(partition) == before


def _rows(folder: Path, partition: int) -> list[tuple[int, bytes]]:
    """Return the rows of `batches` that a broker serves after a start on `folder`."""
    if folder.name == "origin":  # it is open
        with sqlite3.connect(folder / "broker.sqlite") as db:
            return db.execute("SELECT position, payload FROM batches ORDER BY position").fetchall()
    store = Store(folder)
    db = store.connect()
    try:
        return db.execute("SELECT position, payload FROM batches ORDER BY position").fetchall()
    finally:
        db.close()
        store.close()


def _payload(path: Path, row_id: int) -> bytes:
    with sqlite3.connect(path) as db:
        payload: bytes = db.execute("SELECT payload FROM batches WHERE position = ?", (row_id,)).fetchone()[0]
        return payload


def _leaf_of_batches(path: Path) -> int:
    """Return the number of a leaf page in the middle of the B-tree of the table `batches`."""
    data = path.read_bytes()
    with sqlite3.connect(path) as db:
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'batches'").fetchone()[0]
    page = data[(root - 1) * page_sums.PAGE_BYTES : root * page_sums.PAGE_BYTES]
    assert page[0] == 5, "an interior page of a table"
    cell = int.from_bytes(page[12 + 4 : 12 + 6], "big")  # the third one
    return int.from_bytes(page[cell : cell + 4], "big")
