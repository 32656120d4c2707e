"""A full disk: recognised, named, waited for, and never a reason to end."""

from __future__ import annotations

import asyncio
import errno
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.exc import OperationalError

from headrace_runtime.errors import DiskFull
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.disk import DiskGuard
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.processor import Handling
from headrace_schemas import Event
from tests.support.full_disk import MeasuredDisk, full_error, small_disk
from tests.support.streams import Service, bench
from tests.support.turns import feedback


def _sqlite_full() -> sqlite3.Error:
    with sqlite3.connect(":memory:") as db:
        db.execute("CREATE TABLE t (x)")
        db.execute("PRAGMA max_page_count = 2")
        with pytest.raises(sqlite3.Error) as caught:
            db.execute("INSERT INTO t VALUES (zeroblob(100000))")
    db.close()
    return caught.value


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EACCES, "x"), False),
        (_sqlite_full(), True),
        (sqlite3.OperationalError("database is locked"), False),
        (disk.full_error("/data"), True),
        (ExceptionGroup("several", [ValueError(), OSError(errno.ENOSPC, "x")]), True),
    ],
    ids=repr,
)
def test_the_errors_of_a_full_disk(error: BaseException, full: bool) -> None:
    assert disk.is_full(error) is full
    wrapped = RuntimeError("a library's own")
    wrapped.__cause__ = error
    assert disk.is_full(wrapped) is full


async def test_work_is_done_as_soon_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_WAIT_S", 0.001)
    tries = 0

    async def work() -> str:
        nonlocal tries
        tries += 1
        if tries < 5:
            raise disk.full_error("/data")
        return "done"

    assert await asyncio.wait_for(disk.retry_while_full(work), 5) == "done"


def test_a_blob_that_finds_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as small:
        store = BlobStore((small.path / "blobs").as_uri())
        stored_ref = store.put(b"kept")
        with pytest.raises(DiskFull, match=f"no space left on {small.path}/blobs"):
            store.put(bytes(2_000_000))
        with pytest.raises(DiskFull):
            store.set_pointer("p", bytes(2_000_000))
        assert [path.name for path in small.path.rglob("*") if path.is_file()] == [stored_ref.sha256]
        assert store.get(store.put(b"later")) == b"later"


async def test_a_database_names_its_disk_and_goes_on_by_itself(tmp_path: Path) -> None:
    database = Database.open("collector", Common(data_dir=tmp_path))
    try:
        async with database.transaction() as tx:
            await tx.execute(text("CREATE TABLE t (x)"))
            await tx.execute(text("PRAGMA max_page_count = 4"))
        with pytest.raises(DiskFull, match=f"no space left on {tmp_path}/db/collector.sqlite"):
            async with database.transaction() as tx:
                await tx.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))
        assert "no space left" in str(await database.ready())
        async with database.transaction() as tx:
            await tx.execute(text("PRAGMA max_page_count = 4000"))
            await tx.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))
        assert await database.ready() is True
    finally:
        await database.close()


async def test_statement_that_fails_at_every_try_is_no_passing_trouble(tmp_path: Path) -> None:
    database = Database.open("collector", Common(data_dir=tmp_path))
    try:
        with pytest.raises(OperationalError, match="syntax error"):
            async with database.transaction() as tx:
                await tx.execute(text("SELECT * FROM nothing"))
    finally:
        await database.close()


def test_the_probe_names_the_folder(tmp_path: Path) -> None:
    assert disk.problem(tmp_path, 4096) is None
    with full_error():
        assert disk.problem(tmp_path, 4096) == str(disk.full_error(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert "cannot be written" in str(disk.problem(tmp_path / "missing", 4096))


def test_guard_stops_at_its_share_of_the_bound_and_counts_what_was_written(tmp_path: Path) -> None:
    measured = MeasuredDisk(900_000_000)
    bound = DiskGuard(tmp_path)
    half, explicit = DiskGuard(tmp_path, share=0.5), DiskGuard(tmp_path, 1_000_000)
    with measured.mounted():
        assert [guard.shortage() for guard in (bound, half, explicit)] == [None] * 3
        for free, stopped in ((60_000_000, 0), (50_000_000, 1), (20_000_000, 2), (900_000, 3), (900_000_000, 0)):
            measured.free_bytes = free
            for guard in (bound, half, explicit):
                guard._measured_s = -math.inf
            shortages = [guard.shortage() for guard in (bound, half, explicit)]
            assert sum(shortage is not None for shortage in shortages) == stopped
            assert all("have to stay free" in shortage for shortage in shortages if shortage is not None)
        guard = DiskGuard(tmp_path, 899_000_000)
        assert [guard.shortage(400_000) is None for _ in range(3)] == [True, True, True], "the disk has not filled up"
        measured.free_bytes = 899_100_000
        assert [guard.shortage(400_000) is None for _ in range(2)] == [True, False], "the rest of what was free before"
        assert "899.1 MB are free" in str(DiskGuard(tmp_path, 900_000_000).shortage())


async def test_stream_service_takes_no_batch_while_the_disk_is_short(tmp_path: Path) -> None:
    """Its timers go on, since they make room; the batch is handled by itself once there is room."""
    handled: list[str] = []

    async def handle(event: Event, _handling: Handling) -> Sequence[Event]:
        handled.append(event.event_id)
        return []

    measured = MeasuredDisk(900_000_000)
    tables = StreamTables(MetaData())
    async with bench(Service(tables, {"feedback": handle}), "sqlite", tmp_path) as stream:
        stream.processor.disk = DiskGuard(tmp_path, 1_000_000)
        with measured.mounted():
            await stream.deliver(feedback())
            measured.free_bytes = 500_000
            stream.processor.disk._measured_s = -math.inf
            waiting = asyncio.create_task(stream.deliver(feedback()))
            finished, _ = await asyncio.wait([waiting], timeout=0.3)
            await stream.processor.prune()
            assert (len(handled), finished) == (1, set())
            measured.free_bytes = 900_000_000
            await asyncio.wait_for(waiting, 10)
    assert len(handled) == 2
