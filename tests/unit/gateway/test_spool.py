"""Tests of the spool.

Events are on the disk when `append` returns, keep their order, and are never discarded. They are sent together where
their order allows it. The size is bounded, and each spool has one owning process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import os
import random
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.capture.spool import RESERVE_BYTES, Shares, Spool, SpoolBroken, Spooled, split_into_stages
from headrace_gateway.settings import CaptureSettings
from headrace_runtime.errors import DiskFull, SettingError, Unavailable
from headrace_runtime.storage.disk import DiskGuard
from headrace_schemas import Event, Feedback, SessionEnd
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.support.gateway import until
from tests.support.machine import MeasuredDisk, full_error

_WRITER = """
import asyncio, os, signal, sys
from pathlib import Path
from headrace_gateway.capture.spool import Spool, Spooled

async def main():
    async with Spool(Path(sys.argv[1]), 1_000_000) as spool:
        for number in range(1000):
            await spool.append([Spooled("turns", b"%d" % number)])
            print(number, flush=True)

asyncio.run(main())
"""


def items(*numbers: int) -> list[Spooled]:
    return [Spooled("turns", b"%d" % number, f"trace-{number}") for number in numbers]


async def values(spool: Spool) -> list[int]:
    return [int(item.value) for item in await spool.oldest(10_000)]


async def test_what_was_appended_is_there_in_order_after_a_restart(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1000) as spool:
        await asyncio.gather(*(spool.append(items(number)) for number in range(50)))
        assert spool.events == 50
    async with Spool(tmp_path, 1000) as spool:
        assert (spool.events, spool.bytes) == (50, 90)
        assert await values(spool) == list(range(50))
        first = await spool.oldest(20)
        assert first[0].traceparent == "trace-0"
        await spool.remove(first)
        await spool.append(items(50))
        assert await values(spool) == list(range(20, 51))
        await spool.remove(await spool.oldest(10_000))
        assert (spool.events, spool.bytes) == (0, 0)


def _killed_while_writing(folder: Path) -> list[int]:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        acknowledged = [int(writer.stdout.readline()) for _ in range(40)]
        writer.kill()
    return acknowledged


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    acknowledged = _killed_while_writing(tmp_path)
    async with Spool(tmp_path, 1000) as spool:
        numbers = await values(spool)
        assert numbers[:40] == acknowledged
        assert numbers == list(range(len(numbers)))


async def test_what_is_appended_is_synced(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1000) as spool:
        with mock.patch.object(os, "fdatasync") as sync:
            await spool.append(items(1))
        assert sync.call_count == 1


async def test_its_bound_stops_admission_not_work_under_way(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1000) as spool:
        full = []
        for size in (999, 1, 1):
            await spool.append([Spooled("turns", b"x" * size)])
            full.append(spool.full)
        assert full == [False, True, True]
        assert spool.events == 3


async def test_two_gateways_cannot_share_one(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1000):
        with pytest.raises(SettingError, match="belongs to another gateway"):
            async with Spool(tmp_path, 1000):
                pass
    async with Spool(tmp_path, 1000):
        pass


async def test_a_file_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    (tmp_path / "spool.db").write_bytes(b"not a database at all, whatever it was before" * 100)
    with pytest.raises(SpoolBroken, match="move it aside"):
        async with Spool(tmp_path, 1000):
            pass
    assert (tmp_path / "spool.db").read_bytes().startswith(b"not a database")


async def test_a_disk_that_refuses_is_an_error_and_not_a_loss_of_count(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1000) as spool:
        await spool.append(items(1))
        with full_error(in_place=False), pytest.raises(DiskFull, match=f"no space left on {tmp_path}"):
            await spool.append(items(2))
        assert spool.events == 1
        await spool.append(items(3))
        assert await values(spool) == [1, 3]


async def test_what_was_refused_is_not_found_by_a_later_process(tmp_path: Path) -> None:
    """The bytes were written, but the sync failed afterwards, so that `append` did not acknowledge them."""
    async with Spool(tmp_path, 1000) as spool:
        await spool.append(items(1))
        refusal = OSError(errno.EIO, "Input/output error")
        with mock.patch.object(os, "fdatasync", side_effect=refusal), pytest.raises(Unavailable, match="disk: "):
            await spool.append(items(2))
        await spool.append(items(3))
    async with Spool(tmp_path, 1000) as spool:
        assert await values(spool) == [1, 3]


async def test_what_was_allocated_ahead_takes_work_while_the_disk_is_full(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1_000_000, reserve_bytes=8192) as spool:
        with full_error():
            for number in range(100):
                await spool.append(items(number))
                if spool.trouble:
                    break
            assert spool.trouble == f"disk: no space left on {tmp_path}; free space there, a restart is not needed"
            for later in range(number + 1, number + 20):
                await spool.append(items(later))
            assert await values(spool) == list(range(number + 20))
            await spool.remove(await spool.oldest(10_000))
        await until(lambda: spool.trouble is None)
        assert await values(spool) == []


async def test_it_starts_on_a_full_disk_and_takes_work_when_there_is_room(tmp_path: Path) -> None:
    with full_error():
        spool = Spool(tmp_path, 1000)
        await spool.__aenter__()
        assert spool.trouble is not None
        with pytest.raises(DiskFull):
            await spool.append(items(1))
    await until(lambda: spool.trouble is None)
    await spool.append(items(2))
    assert await values(spool) == [2]
    await spool.__aexit__()


async def test_files_that_are_done_go_and_their_numbers_do_not_come_again(tmp_path: Path) -> None:
    for again in range(3):
        async with Spool(tmp_path, 1_000_000, reserve_bytes=2048) as spool:
            assert await values(spool) == []
            for number in range(60):
                await spool.append(items(number + again))
            assert await values(spool) == list(range(again, 60 + again))
            await spool.remove(await spool.oldest(10_000))
            assert len(_files(tmp_path)) <= 3


async def test_a_spool_that_was_a_database_is_taken_over(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "spool.db")) as db, db:
        db.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, topic TEXT, traceparent TEXT, value BLOB)")
        rows = [("turns", f"trace-{number}", b"%d" % number) for number in range(3)]
        db.executemany("INSERT INTO events (topic, traceparent, value) VALUES (?, ?, ?)", rows)
    for _ in range(2):
        async with Spool(tmp_path, 1000) as spool:
            assert await values(spool) == [0, 1, 2]
            assert (await spool.oldest(1))[0].traceparent == "trace-0"


@pytest.mark.parametrize("running", [False, True], ids=["found at the start", "while it runs"])
async def test_a_flipped_byte_costs_the_record_that_it_hits(tmp_path: Path, running: bool) -> None:
    rng = random.Random(7)
    written = [Spooled("turns", b'{"number": %d, "text": "%s"}' % (number, b"x" * 90)) for number in range(100)]
    silent = lost = 0
    for trial in range(150):
        folder = tmp_path / str(trial)
        async with Spool(folder, 1_000_000, reserve_bytes=65_536) as spool:
            await spool.append(written)
            if running:
                _flip(folder, rng, spool._log._segments[0].end)
                read_events = await spool.oldest(1000)
            end = spool._log._segments[0].end
        if not running:
            _flip(folder, rng, end)
            async with Spool(folder, 1_000_000, reserve_bytes=65_536) as spool:
                read_events = await spool.oldest(1000)
        intact_values = [event.value for event in read_events if not event.damage]
        silent += len([value for value in intact_values if value not in {event.value for event in written}])
        lost += len(written) - len(intact_values)
        assert len(intact_values) >= len(written) - 1
        assert all(".spool, byte " in event.damage for event in read_events if event.damage)
        assert len(read_events) - len(intact_values) == len(written) - len(intact_values), "each loss is told"
    assert (silent, lost) == (0, 150)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.spool"))


def _flip(folder: Path, rng: random.Random, end: int) -> None:
    path = min(folder.glob("*.spool"))
    with path.open("r+b") as file:
        at = rng.randrange(end)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))


async def test_a_damaged_position_only_sends_again(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1000, reserve_bytes=65_536) as spool:
        await spool.append(items(*range(10)))
        for _ in range(3):
            await spool.remove(await spool.oldest(2))
    position = (tmp_path / "position").read_bytes()
    for at in range(len(position)):
        (tmp_path / "position").write_bytes(position[:at] + bytes([position[at] ^ 1]) + position[at + 1 :])
        async with Spool(tmp_path, 1000, reserve_bytes=65_536) as spool:
            assert await values(spool) in ([6, 7, 8, 9], [4, 5, 6, 7, 8, 9])
    (tmp_path / "position").write_bytes(b"?" * 80)
    async with Spool(tmp_path, 1000) as spool:
        assert await values(spool) == list(range(10))


async def test_what_is_being_written_counts_and_nothing_is_done_beside_it(tmp_path: Path) -> None:
    go = threading.Event()
    async with Spool(tmp_path, 1000) as spool:
        with mock.patch.object(os, "fdatasync", side_effect=lambda _: go.wait(10)):
            writing = asyncio.create_task(spool.append(items(1)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reading = asyncio.create_task(spool.oldest(10))
            await asyncio.sleep(0)
            threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("spool")]
            assert (spool.events, spool.bytes, len(threads)) == (1, 1, 1)
            go.set()
            await writing
        assert [item.value for item in await reading] == [b"1"]
        assert (spool.events, spool.bytes) == (1, 1)


async def test_it_tells_whose_events_wait(tmp_path: Path) -> None:
    written = [b'{"tenant": "a", "n": 1}', b'{"tenant": "b"}', b'{"tenant": "a"}', b"nobody's", b'["a"]']
    async with Spool(tmp_path, 1000) as spool:
        await spool.append([Spooled("dead-letters", value) for value in written])
        await spool.append([Spooled("feedback", b"{}")])  # events leave out the default tenant
        assert await spool.tenants() == {"a": 38, "b": 15, "": 13, "default": 2}


def test_shares_of_a_tenant_are_what_still_waits() -> None:
    shares, event = Shares(), Spooled("dead-letters", b'{"tenant": "a"}')
    shares.add([event, event])
    shares.remove([event])
    assert shares.of("a") == 15
    shares.remove([event])
    assert shares.of("a") == 0


async def test_leaving_it_on_a_full_disk_ends_what_it_began(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    with full_error():
        async with Spool(tmp_path, 1000) as spool:
            for _ in range(2):
                with pytest.raises(DiskFull):
                    await spool.append(items(1))
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def test_its_reserve_is_that_of_the_settings_unless_told_otherwise() -> None:
    assert CaptureSettings().spool_reserve_bytes == RESERVE_BYTES


async def test_new_work_is_refused_while_the_disk_is_short_and_work_in_progress_is_kept(tmp_path: Path) -> None:
    measured = MeasuredDisk(900_000_000)
    guard = DiskGuard(tmp_path, 1_000_000, share=0.5)
    with measured.mounted():
        async with Spool(tmp_path / "spool", 1_000_000, 131_072, guard) as spool:
            assert spool.trouble is None
            measured.free_bytes = 400_000
            guard._measured_s = -math.inf
            await spool.append(items(1))
            assert "have to stay free" in str(spool.trouble)
            await spool.append(items(2))
            assert await values(spool) == [1, 2]
            measured.free_bytes = 900_000_000
            await until(lambda: spool.trouble is None)


KEYS = [ids.session_key("default", name) for name in ("a", "b", "c")]


def feedback(key: str) -> Feedback:
    return Feedback(time=utcnow(), feedback_id="f", session_key=key, value=1.0)


def end(key: str) -> SessionEnd:
    return SessionEnd(time=utcnow(), end_id="e", session_key=key)


def commit() -> SessionEnd:
    return SessionEnd(time=utcnow(), end_id="c", scope="tenant", reason="commit")


def stages(events: list[Event]) -> list[list[int]]:
    """Return the stages that `events` are sent in, as lists of indices into `events`."""
    return split_into_stages(list(range(len(events))), lambda index: events[index])


def test_sessions_owe_each_other_nothing_and_an_end_waits_for_its_own_events() -> None:
    a, b, _ = KEYS
    assert stages([feedback(a), end(a), feedback(b), feedback(b), end(b), feedback(a)]) == [[0, 2, 3], [1, 4], [5]]


def test_the_end_of_a_tenant_stands_alone() -> None:
    a, b, _ = KEYS
    assert stages([feedback(a), feedback(b), end(b), commit(), feedback(a), end(b)]) == [[0, 1], [2], [3], [4, 5]]


events = st.one_of(st.builds(feedback, st.sampled_from(KEYS)), st.builds(end, st.sampled_from(KEYS)), st.builds(commit))


@given(st.lists(events, max_size=30))
def test_a_session_keeps_its_order_in_as_few_stages_as_its_topics_take_turns(sent: list[Event]) -> None:
    staged = stages(sent)
    assert sorted(itertools.chain(*staged)) == list(range(len(sent)))
    assert all(staged)
    at = {index: number for number, stage in enumerate(staged) for index in stage}
    assert all(stage == sorted(stage) for stage in staged)
    for first, second in itertools.combinations(range(len(sent)), 2):
        if sent[first].key == sent[second].key:
            assert at[first] + (sent[first].topic != sent[second].topic) <= at[second]
        if "c" in (getattr(sent[first], "end_id", ""), getattr(sent[second], "end_id", "")):
            assert at[first] < at[second]
    assert len(staged) <= _turns_taken(sent)


def _turns_taken(sent: list[Event]) -> int:
    """Return the largest number of stages that `sent` may need: changes of topic in a session, and one for each
    commit."""
    total, between = 0, list[Event]()
    for event in [*sent, commit()]:
        if isinstance(event, SessionEnd) and event.scope == "tenant":
            runs = [[topic for topic, _ in itertools.groupby(e.topic for e in between if e.key == key)] for key in KEYS]
            total, between = total + max(map(len, runs)) + 1, []
        else:
            between.append(event)
    return total - 1
