"""Parent process of one service in a container, which kills the service if it sends no heartbeats.

`python -m headrace_runtime.watchdog COMMAND...` starts COMMAND with the pipe of `liveness`, forwards signals to it, and
exits with its status. If COMMAND sends no heartbeat for `HANG_TIMEOUT_S` (30), it is killed, and the exit status is 1,
so that the container is restarted. Until its first heartbeat a service has `START_TIMEOUT_S` (300) for its imports.
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

from headrace_runtime.process.liveness import VARIABLE, LivenessWatch
from headrace_runtime.process.parent_death import parent_bound_command

HANG_TIMEOUT = "HANG_TIMEOUT_S"
START_TIMEOUT = "START_TIMEOUT_S"
_LOOK_S = 1.0


def watch(command: Sequence[str], hang_timeout_s: float, start_timeout_s: float) -> int:
    """Run `command` until it ends. Return its exit status in the form of a shell, or 1 if it was killed because it sent
    no heartbeats."""
    liveness = LivenessWatch()
    writing = liveness.open()
    process = subprocess.Popen(
        parent_bound_command(command),
        pass_fds=(writing,),
        env={**os.environ, VARIABLE: str(writing)},
        start_new_session=True,
    )
    liveness.started(time.monotonic())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    try:
        if _ends(process, liveness, hang_timeout_s, start_timeout_s):
            status = process.wait()
            return status if status >= 0 else 128 - status
        sys.stderr.write(f"watchdog: {command[-1]} hangs: no heartbeat within the timeout; killing it\n")
        return 1
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its own child processes end, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ends(
    process: subprocess.Popen[bytes], liveness: LivenessWatch, hang_timeout_s: float, start_timeout_s: float
) -> bool:
    """Wait until the process ends and return True, or return False if it has sent no heartbeat for too long."""
    assert liveness.reading is not None
    with selectors.DefaultSelector() as selector:
        selector.register(liveness.reading, selectors.EVENT_READ)
        while process.poll() is None:
            selector.select(_LOOK_S)
            liveness.poll(time.monotonic())
            if liveness.ended:  # the process ends, or it does not use the pipe
                process.wait()
            elif liveness.silent_s > (hang_timeout_s if liveness.beats else start_timeout_s):
                return False
    return True


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    sys.exit(f"watchdog: {name} = {text!r}: must be a number of seconds above 0")


if __name__ == "__main__":
    sys.exit(watch(sys.argv[1:], _seconds(os.environ, HANG_TIMEOUT, 30.0), _seconds(os.environ, START_TIMEOUT, 300.0)))
