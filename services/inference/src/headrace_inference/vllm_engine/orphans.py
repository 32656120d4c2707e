"""Ends an engine core whose service was killed: vLLM leaves it, and the memory of its GPU with it.

vLLM calls `end_with_the_service` in each of its processes, because it is announced as one of its plugins. Workers end
with their core by vLLM's own doing.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "_HEADRACE_VLLM_SERVICE"
"""Holds the process id of the service, in the environment of the engine cores that it starts. Settings are named
`HEADRACE_...`; a service would refuse this one as unknown."""
_INTERVAL_S = 0.5


def end_with_the_service() -> None:
    """In a child of the service, watch it from a thread; elsewhere do nothing. Does not block."""
    service = os.environ.get(VARIABLE)
    if service and service != str(os.getpid()) and threading.current_thread() is threading.main_thread():
        threading.Thread(target=_watch, args=(int(service),), name="headrace-orphans", daemon=True).start()


def _watch(service: int) -> None:
    if os.getppid() != service and _lives(service):
        return  # the child of a child, which its own parent ends
    while os.getppid() == service:
        time.sleep(_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
