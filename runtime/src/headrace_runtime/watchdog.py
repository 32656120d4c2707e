"""A parent for one service where no supervisor of ours runs, as in a container: it kills what hangs.

`python -m headrace_runtime.watchdog COMMAND...` starts COMMAND, hands it the pipe of `liveness`, passes signals on and
ends as it does. After `HANG_TIMEOUT_S` (30) without a sign of life it kills it and ends with 1, and whoever restarts
what ends has nothing else to know. Until its first sign of life a service has `START_TIMEOUT_S` (300): it imports.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from headrace_runtime.liveness import VARIABLE
from headrace_runtime.parent_death import leashed

HANG_TIMEOUT = "HANG_TIMEOUT_S"
START_TIMEOUT = "START_TIMEOUT_S"
_LOOK_S = 1.0
_LOOK_S_MAX = 4.0
"""More than this between two looks is our own absence: a frozen container ages nobody."""
_READ_BYTES = 4096


def watch(command: Sequence[str], hang_timeout_s: float, start_timeout_s: float) -> int:
    """Run `command` to its end. Returns its exit status as a shell has it; 1 when it was killed for hanging."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    process = subprocess.Popen(
        leashed(command), pass_fds=(writing,), env={**os.environ, VARIABLE: str(writing)}, start_new_session=True
    )
    os.close(writing)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    try:
        if _ends(process, reading, hang_timeout_s, start_timeout_s):
            status = process.wait()
            return status if status >= 0 else 128 - status
        sys.stderr.write(f"watchdog: {command[-1]} hangs: no sign of life for its time; killing it\n")
        return 1
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what it has left behind ends with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ends(process: subprocess.Popen[bytes], pipe: int, hang_timeout_s: float, start_timeout_s: float) -> bool:
    """Waits; False: it is there and has been silent for too long."""
    limit_s, silent_s, looked_s = start_timeout_s, 0.0, time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while process.poll() is None:
            said = selector.select(_LOOK_S) and os.read(pipe, _READ_BYTES)
            now_s = time.monotonic()
            silent_s += min(now_s - looked_s, _LOOK_S_MAX)
            looked_s = now_s
            if said:
                limit_s, silent_s = hang_timeout_s, 0.0
            elif silent_s > limit_s:
                return False
            elif said == b"":  # closed: it ends, or it does not know the pipe
                selector.unregister(pipe)
                return _ends_unwatched(process)
    return True


def _ends_unwatched(process: subprocess.Popen[bytes]) -> bool:
    process.wait()
    return True


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    sys.exit(f"watchdog: {name} = {text!r}: must be a number of seconds above 0")


if __name__ == "__main__":
    sys.exit(watch(sys.argv[1:], _seconds(os.environ, HANG_TIMEOUT, 30.0), _seconds(os.environ, START_TIMEOUT, 300.0)))
