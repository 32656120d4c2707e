"""Free loopback ports and waiting for them."""

from __future__ import annotations

import socket
import time


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
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
