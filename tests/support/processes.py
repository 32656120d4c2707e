"""Whether processes of others still run, and waiting for conditions with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll until `condition()` is true. Raises `TimeoutError` that names `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {timeout_s} s")
        time.sleep(0.02)
