"""Termination of engine cores whose service was killed. vLLM would keep them running, with the memory of their GPU.

vLLM calls `end_with_the_service` in each of its processes, because it is announced as a plugin of vLLM. vLLM itself
ends workers together with their core.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "_HEADRACE_VLLM_SERVICE"
"""Environment variable with the process id of the service, for the engine cores that it starts. Names of settings begin
with `HEADRACE_`, and a service would refuse this one as an unknown setting."""
_INTERVAL_S = 0.5


def end_with_the_service() -> None:
    """Start a thread that ends this process when the service that started it has died.

    It has no effect in processes that the service did not start.
    """
    service = os.environ.get(VARIABLE)
    if service and service != str(os.getpid()) and threading.current_thread() is threading.main_thread():
        threading.Thread(target=_watch, args=(int(service),), name="headrace-orphans", daemon=True).start()


def _watch(service: int) -> None:
    if os.getppid() != service and _is_running(service):
        return  # a child of a child, which its own parent ends
    while os.getppid() == service:
        time.sleep(_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
