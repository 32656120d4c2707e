"""Free loopback ports and waiting for them."""

from __future__ import annotations

import contextlib
import random
import socket
import time


def free_port() -> int:
    """Below those that the system gives to outgoing connections, so that it is still free when it is needed."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_open(port: int, timeout_s: float) -> None:
    """Raises `TimeoutError` when nobody listens on `port` in time."""
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
