"""Reaper of processes that tests started, however the tests end.

A separate process waits for the end of the tests, kills the remaining processes and removes the folders of
`folder_prefix`. `start` sets an environment variable, which every descendant inherits. So no test has to register a
process, and the end of a thread is not mistaken for the end of the process, as with a parent-death signal. Linux only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

_MARK = "STARTED_BY_TESTS"
_ROUNDS_MAX = 100
_PAUSE_S = 0.1
_started: list[int] = []
"""Write end of the pipe that is closed when this process ends."""


def start() -> None:
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


def _main(pipe: int, mark: str) -> None:
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
    _main(int(sys.argv[1]), sys.argv[2])
