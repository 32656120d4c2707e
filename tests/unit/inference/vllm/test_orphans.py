"""An engine core ends by itself if its service is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import psutil

from headrace_inference.vllm_engine import orphans
from headrace_inference.vllm_engine.orphans import VARIABLE, end_with_the_service

CORE = """
import os, time
from headrace_inference.vllm_engine.orphans import end_with_the_service
end_with_the_service()
print(os.getpid(), flush=True)
time.sleep(300)
"""
SERVICE = f"""
import os, subprocess, sys
os.environ["{VARIABLE}"] = str(os.getpid())
subprocess.run([sys.executable, "-c", {CORE!r}])
"""


def test_a_core_ends_with_its_service() -> None:
    service = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    core = psutil.Process(int(service.stdout.readline()))
    try:
        assert core.is_running()
        service.kill()
        service.wait(10)
        _, alive = psutil.wait_procs([core], 30)
        assert alive == []
    finally:
        if core.is_running():
            os.kill(core.pid, signal.SIGKILL)


def test_the_service_itself_watches_nobody() -> None:
    before = psutil.Process().num_threads()
    end_with_the_service()
    os.environ[VARIABLE] = str(os.getpid())
    try:
        end_with_the_service()
    finally:
        del os.environ[VARIABLE]
    assert psutil.Process().num_threads() == before


def test_vllm_is_told_of_it() -> None:
    (plugin,) = [
        entry_point for entry_point in entry_points(group="vllm.general_plugins") if entry_point.name == "headrace"
    ]
    assert plugin.load() is orphans.end_with_the_service
