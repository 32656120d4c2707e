"""Helpers for processes: commands that must succeed, waiting with a limit, free ports, and the reaper.

The reaper is a separate process, which runs this file. It waits for the end of the tests, kills the remaining processes
and removes the folders of `folder_prefix`. `start_reaper` sets an environment variable, which every descendant
inherits. So no test has to register a process, and the end of a thread is not mistaken for the end of the process, as
with a parent-death signal. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path


def must_run(command: Sequence[str], *, user: int | None = None) -> None:
    """Run `command`, optionally with the user and group id `user`.

    Raises `AssertionError` with the output if it fails.
    """
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, user=user, group=user
    )
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}:\n{process.stdout[-4000:]}"


def alive(pid: int) -> bool:
    """Return whether the process `pid` runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def naming(text: str) -> dict[int, str]:
    """Return the command lines, by process id, of other processes whose command line or environment contains `text`."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:  # gone, or not ours
            continue
        if text.encode() in command + environ and int(folder.name) != os.getpid():
            processes[int(folder.name)] = command.replace(b"\0", b" ").decode("utf-8", "replace")
    return processes


def wait_until(condition: Callable[[], object], timeout_s: float, description: str) -> None:
    """Poll until `condition()` is true. Raises `TimeoutError` with the description of the condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{description}: not after {timeout_s} s")
        time.sleep(0.02)


_RANGE = (15_000, 32_000)
"""Range of the ports: below those of outgoing connections, so that a port stays free until it is used."""
_chance = random.SystemRandom()
"""Generator of this module alone: a test that seeds Python's generator would make all workers choose the same ports."""
_assigned: set[int] = set()


def free_port() -> int:
    """Return a port without a listener that no worker of this pytest run has received before."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = _chance.randrange(_RANGE[0] + worker, _RANGE[1], workers)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _assigned:
                _assigned.add(port)
                return port


def wait_open(port: int, timeout_s: float) -> None:
    """Wait until a process listens on `port`. Raises `TimeoutError`."""
    deadline = time.monotonic() + timeout_s
    while not is_open(port):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port} after {timeout_s} s")
        time.sleep(0.05)


def is_open(port: int) -> bool:
    """Return whether a process listens on `port`."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


_MARK = "STARTED_BY_TESTS"
_ROUNDS_MAX = 100
_PAUSE_S = 0.1
_started: list[int] = []
"""Write end of the pipe that is closed when this process ends."""


def start_reaper() -> None:
    """Start the reaper once per process; later calls have no effect.

    Call this function before any process is started.
    """
    if _started or sys.platform != "linux":
        return
    mark = f"{_MARK}={uuid.uuid4().hex}"
    reading, writing = os.pipe()
    environ = {name: text for name, text in os.environ.items() if name != _MARK}
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(reading), mark],
        pass_fds=(reading,),
        env=environ,
        start_new_session=True,  # a signal to our whole group must not end it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(reading)
    _started.append(writing)
    os.environ[_MARK] = mark.partition("=")[2]


def folder_prefix(name: str) -> str:
    """Return a prefix for a folder in the system's temporary folder; the folder is removed even if this process is
    killed.
    """
    return f"headrace-{name}-{os.environ.get(_MARK, '')}-"


def _reap(pipe: int, mark: str) -> None:
    while os.read(pipe, 1):
        pass
    _kill_processes(mark)
    for folder in Path(tempfile.gettempdir()).glob(f"headrace-*-{mark.partition('=')[2]}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _kill_processes(mark: str) -> None:
    for _ in range(_ROUNDS_MAX):
        left = _left(mark.encode())
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # gone, or not ours to end
                continue
        time.sleep(_PAUSE_S)


def _left(mark: bytes) -> set[int]:
    """Return the marked processes and their descendants, as a server may overwrite its environment with a title."""
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if state in "ZX":
            continue
        parents[int(folder.name)] = int(parent)
        if marked:
            pids.add(int(folder.name))
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {os.getpid()}


if __name__ == "__main__":
    _reap(int(sys.argv[1]), sys.argv[2])
