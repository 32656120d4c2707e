"""A wrong clock is the wall clock of a process, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import wrong_clock

PROGRAM = """
import asyncio, datetime, sys, threading, time
for line in sys.stdin:
    began = time.monotonic()
    time.sleep(0.01)
    threading.Event().wait(0.01)
    asyncio.run(asyncio.sleep(0.01))
    assert 0.03 <= time.monotonic() - began < 60
    print(time.time(), time.time_ns() / 1e9, datetime.datetime.now(datetime.UTC).timestamp(), flush=True)
"""


@pytest.mark.skipif(wrong_clock.missing() is not None, reason="needs a C compiler")
def test_steps_in_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    environ = wrong_clock.environ(tmp_path, file)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        for by_s in (0.0, 1000.0, -1000.0, 0.0):
            wrong_clock.step(file, by_s)
            assert process.stdin
            assert process.stdout
            process.stdin.write("\n")
            process.stdin.flush()
            true = time.time()
            assert [float(said) - true for said in process.stdout.readline().split()] == pytest.approx(
                [by_s] * 3, abs=60
            )
        assert process.stdin
        process.stdin.close()
