"""Parent of a service in a container: passes signals on, ends with the service's status, kills a hung service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import alive, wait_until

SERVICE = """
import asyncio, os, pathlib, signal, sys, time
from headrace_runtime.process import liveness

async def main():
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    if sys.argv[2] == "stuck":
        time.sleep(600)
    if sys.argv[2] == "status":
        sys.exit(int(sys.argv[3]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: os._exit(7))
    await asyncio.sleep(600)

async def serve():
    async with liveness.send_heartbeats(liveness.take_inherited_pipe(os.environ)):
        await asyncio.sleep(0)
        await main()

asyncio.run(serve())
"""


class Watched:
    def __init__(self, folder: Path, *arguments: str, hang_timeout_s: str = "2") -> None:
        self._file = folder / "pid"
        command = [sys.executable, "-m", "headrace_runtime.watchdog", sys.executable, "-c", SERVICE]
        self.watchdog = subprocess.Popen(
            [*command, str(self._file), *arguments],
            env={**os.environ, "HANG_TIMEOUT_S": hang_timeout_s, "START_TIMEOUT_S": "60"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def pid(self) -> int:
        wait_until(lambda: self._file.exists() and self._file.read_text(), 20, "the service")
        return int(self._file.read_text())


@pytest.mark.parametrize("status", [0, 2, 3])
def test_it_ends_as_the_service_does(tmp_path: Path, status: int) -> None:
    assert Watched(tmp_path, "status", str(status)).watchdog.wait(20) == status


def test_a_stop_is_passed_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run")
    watched.pid()
    watched.watchdog.send_signal(signal.SIGTERM)
    assert watched.watchdog.wait(20) in (7, 128 + signal.SIGTERM)


def test_a_killed_service_is_told_by_its_status(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run")
    os.kill(watched.pid(), signal.SIGKILL)
    assert watched.watchdog.wait(20) == 128 + signal.SIGKILL


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_what_hangs_is_killed(tmp_path: Path, how: str) -> None:
    watched = Watched(tmp_path, "stuck" if how == "stuck" else "run")
    pid = watched.pid()
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    assert watched.watchdog.wait(30) == 1
    assert not alive(pid)
    assert watched.watchdog.stderr is not None
    assert "no heartbeat within the timeout" in watched.watchdog.stderr.read()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_a_killed_watchdog_leaves_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run")
    pid = watched.pid()
    watched.watchdog.kill()
    wait_until(lambda: not alive(pid), 10, "the service's end")


def test_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run", hang_timeout_s="soon")
    assert watched.watchdog.wait(20) == 1
    assert watched.watchdog.stderr is not None
    assert "HANG_TIMEOUT_S = 'soon'" in watched.watchdog.stderr.read()
