"""Free loopback ports and waiting for them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time

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
