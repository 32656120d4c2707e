"""Helpers for processes: commands that must succeed, running processes, waiting with a limit, and free ports."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
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
