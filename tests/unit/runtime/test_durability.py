"""Tests of the outbox and of full disks.

An effect and its events are committed together, and the events reach the bus in order once it answers. A full disk is
recognised, reported and waited for, and never ends the process.
"""

from __future__ import annotations

import asyncio
import errno
import math
import sqlite3
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import MetaData, event, text
from sqlalchemy.exc import OperationalError

from headrace_runtime.errors import DiskFull, InvalidEvent, Unavailable
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.disk import DiskGuard
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.processor import Handling
from headrace_schemas import DeadLetter, Event, Reward
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX
from headrace_schemas.values.ids import session_key
from tests.support.machine import MeasuredDisk, full_error, small_disk
from tests.support.streams import Bench, Service, bench
from tests.support.turns import START, feedback

metadata = MetaData()
tables = StreamTables(metadata)
KEY = session_key("default", "s")


def reward(name: str, reason: str | None = None) -> Reward:
    return Reward(time=START, trajectory_id=name, session_key=KEY, source="f", value=1.0, reason=reason)


@pytest.fixture
async def stream(database_url: str, data_dir: Path) -> AsyncIterator[Bench]:
    async with bench(Service(tables, {}), database_url, data_dir) as service_bench:
        yield service_bench


@pytest.fixture
def outbox(stream: Bench) -> Outbox:
    return stream.processor.outbox


async def owe(stream: Bench, outbox: Outbox, *names: str) -> None:
    async with stream.processor.database.transaction() as tx:
        await outbox.add(tx, await outbox.encode([reward(name) for name in names]))
    outbox.mark_committed()


def sent(stream: Bench) -> list[str]:
    return [event.trajectory_id for event in stream.sent(Reward)]


def another(stream: Bench) -> Outbox:
    """Return the outbox of a restarted process or of another replica."""
    return Outbox(stream.processor.database, tables, stream.producer, stream.clock)


async def test_what_is_owed_is_sent_in_order_and_then_forgotten(stream: Bench, outbox: Outbox) -> None:
    await owe(stream, outbox, *map(str, range(30)))
    assert sent(stream) == []
    await outbox.flush()
    await owe(stream, outbox, "last")
    await outbox.flush()
    assert sent(stream) == [*map(str, range(30)), "last"]
    assert await stream.count("outbox") == 1, "acknowledged rows go with the next transaction"


async def test_rows_are_inserted_in_few_statements(stream: Bench, outbox: Outbox) -> None:
    inserts: list[str] = []

    def note(_connection: object, _cursor: object, sql: str, *_rest: object) -> None:
        inserts.extend([sql] if "INSERT INTO outbox" in sql else [])

    engine = stream.processor.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    await owe(stream, outbox, *map(str, range(50)))
    event.remove(engine, "before_cursor_execute", note)
    assert len(inserts) == 1


async def test_a_transaction_that_failed_owes_nothing(stream: Bench, outbox: Outbox) -> None:
    async with stream.aborted() as tx:
        await outbox.add(tx, await outbox.encode([reward("never")]))
    outbox.mark_rolled_back()
    await owe(stream, outbox, "a")
    await outbox.flush()
    assert sent(stream) == ["a"]


async def test_acknowledged_rows_stay_until_their_removal_is_durable(stream: Bench, outbox: Outbox) -> None:
    await owe(stream, outbox, "a")
    await outbox.flush()
    async with stream.aborted() as tx:
        await outbox.add(tx, [])
    outbox.mark_rolled_back()
    assert await stream.count("outbox") == 1
    await owe(stream, outbox, "b")
    assert await stream.count("outbox") == 1


async def test_a_commit_of_which_nobody_heard_loses_nothing(stream: Bench, outbox: Outbox) -> None:
    """The rows are committed, but their owner saw an error. It must not take them for rows that it has sent."""
    await owe(stream, outbox, "a")
    await outbox.flush()
    async with stream.processor.database.transaction() as tx:
        await outbox.add(tx, await outbox.encode([reward("b")]))
    outbox.mark_rolled_back()
    await owe(stream, outbox, "c")
    await outbox.flush()
    stream.clock.advance(31)
    await outbox.adopt()
    assert sorted(sent(stream)) == ["a", "b", "c"]


async def test_a_bus_that_is_away_gets_everything_later(stream: Bench, outbox: Outbox) -> None:
    await owe(stream, outbox, "a", "b")
    stream.producer.fail(1)
    with pytest.raises(Unavailable):
        await outbox.flush()
    await outbox.flush()
    assert sent(stream) == ["a", "b"]


async def test_a_new_process_sends_what_the_dead_one_owed_byte_for_byte(stream: Bench, outbox: Outbox) -> None:
    await owe(stream, outbox, "a", "b")
    assert await another(stream).adopt(at_start=True) == 2
    adopted = list(stream.producer.records)
    stream.forget_sent()
    await outbox.flush()
    assert adopted == stream.producer.records, "sent again, and equal"


async def test_more_rows_than_fit_one_batch_are_all_adopted(stream: Bench, outbox: Outbox) -> None:
    names = [str(n) for n in range(1101)]
    await owe(stream, outbox, *names)
    assert await another(stream).adopt(at_start=True) == 1101
    assert sent(stream) == names
    assert await stream.count("outbox") == 0


async def test_a_replica_leaves_the_fresh_rows_of_another_alone(stream: Bench, outbox: Outbox) -> None:
    await owe(stream, outbox, "a")
    other = another(stream)
    stream.clock.advance(30)
    assert await other.adopt() == 0
    stream.clock.advance(0.001)
    assert await other.adopt() == 1


async def test_a_large_event_is_owed_as_a_reference(stream: Bench, outbox: Outbox) -> None:
    async with stream.processor.database.transaction() as tx:
        await outbox.add(tx, await outbox.encode([reward("big", "x" * (PAYLOAD_BYTES_MAX + 1))]))
        (size,) = (await tx.execute(text("SELECT length(value) FROM outbox"))).one()
    assert size < 512


async def test_more_than_one_batch_is_sent_and_forgotten_whole(
    stream: Bench, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = stream.producer.send_raw

    async def noted(records: Sequence[Outgoing]) -> None:
        sizes.append(len(records))
        await send(records)

    monkeypatch.setattr(stream.producer, "send_raw", noted)
    names = [f"{number:04}" for number in range(1203)]
    await owe(stream, outbox, *names)
    assert REGISTRY.get_sample_value("headrace_outbox_rows") == 1203
    await outbox.flush()
    assert REGISTRY.get_sample_value("headrace_outbox_rows") == 0
    assert (sent(stream), sizes) == (names, [500, 500, 203])
    await owe(stream, outbox, "last")
    await outbox.flush()
    await owe(stream, outbox)
    assert await stream.count("outbox") == 0, "every row that was acknowledged is gone"


async def test_a_record_that_the_bus_refuses_for_good_is_named_and_holds_up_no_other(
    stream: Bench, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is refused for good, because otherwise its row would be sent again after every restart."""
    send = stream.producer.send_raw

    async def strict(records: Iterable[Outgoing]) -> None:
        if any(b'"too large"' in (record.value or b"") for record in records if record.topic == "rewards"):
            raise InvalidEvent("too_large", "a record is larger than the bus takes")
        await send(records)

    monkeypatch.setattr(stream.producer, "send_raw", strict)
    await owe(stream, outbox, "a", "too large", "b")
    await outbox.flush()
    assert sent(stream) == ["a", "b"]
    await another(stream).adopt(at_start=True)
    assert sent(stream) == ["a", "b", "a", "b"]
    assert {letter.reason for letter in stream.sent(DeadLetter)} == {"too_large"}
    assert await stream.count("outbox") == 0


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
    """The timers continue, since they free space. The batch is handled once there is space."""
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
