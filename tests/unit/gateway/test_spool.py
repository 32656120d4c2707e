"""What the spool promises: on the disk when `append` returns, in order, bounded, one owner, never thrown away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_gateway.spool import Spool, SpoolBroken, Spooled
from headrace_runtime.errors import SettingError, Unavailable

_WRITER = """
import asyncio, os, signal, sys
from pathlib import Path
from headrace_gateway.spool import Spool, Spooled

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
        found = await values(spool)
        assert found[:40] == acknowledged
        assert found == list(range(len(found)))


async def test_what_is_appended_is_fsynced(tmp_path: Path) -> None:
    async with Spool(tmp_path, 1000) as spool:
        assert spool._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL: a power cut takes no committed row"


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
        spool._db.execute("PRAGMA query_only = ON")  # what sqlite3 raises for a disk that is full, without filling one
        with pytest.raises(Unavailable, match="spool"):
            await spool.append(items(2))
        assert spool.events == 1
        spool._db.execute("PRAGMA query_only = OFF")
        await spool.append(items(3))
        assert await values(spool) == [1, 3]
