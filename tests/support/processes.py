"""Programs that have to end well, whether processes of others still run, and waiting for conditions with a bound.

Free loopback ports and waiting for them.
"""

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
    """Run `command`. Raises `AssertionError` with its output unless it ends with 0. `user`: id of the user and group to
    run as.
    """
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, user=user, group=user
    )
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}:\n{process.stdout[-4000:]}"


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def naming(text: str) -> dict[int, str]:
    """Return the command lines, by process id, of other processes whose command line or environment holds `text`."""
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
    """Poll until `condition()` is true. Raises `TimeoutError` that names the condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{description}: not after {timeout_s} s")
        time.sleep(0.02)


_RANGE = (15_000, 32_000)
"""Below those that the system gives to outgoing connections, so that a port is still free when it is needed."""
_chance = random.SystemRandom()
"""Generator of this module: a test that seeds Python's generator would make all workers choose the same ports."""
_assigned: set[int] = set()


def free_port() -> int:
    """Return a port without a listener that no call in any worker of this pytest run has returned before."""
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
    """Wait for a listener on `port`. Raises `TimeoutError`."""
    deadline = time.monotonic() + timeout_s
    while not is_open(port):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port} after {timeout_s} s")
        time.sleep(0.05)


def is_open(port: int) -> bool:
    """Whether anybody listens on `port` now."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
