"""Tests that are killed with -9 leave no server and no folder of one behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import postgres_node
from tests.support.processes import alive, naming, wait_until

ROOT = Path(__file__).resolve().parents[2]
INNER = """
import os, subprocess, sys, threading, time, pathlib, pytest

def test_something({fixtures}, tmp_path):
    started = []
    def in_a_thread():  # whose end must end nothing
        command = [sys.executable, "-c", "import os, time; os.fork() or os.setsid(); time.sleep(600)"]
        started.append(subprocess.Popen(command, start_new_session=True))
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert started[0].poll() is None
    told = pathlib.Path({told!r})
    (tmp_path / "folder").write_text({folder})
    (tmp_path / "folder").rename(told)
    {then}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc to find them in")
@pytest.mark.parametrize(
    ("then", "status"),
    [("time.sleep(600)", -9), ("while told.exists(): time.sleep(0.05)", 0)],
    ids=["killed", "forgotten"],
)
def test_nothing_remains(tmp_path: Path, then: str, status: int) -> None:
    fixtures = ["embedded_bus", *([] if postgres_node.missing() else ["postgres"])]
    started_file = tmp_path / "told"
    folder = "str(postgres.folder)" if "postgres" in fixtures else "''"
    inner_test = INNER.format(fixtures=", ".join(fixtures), told=str(started_file), folder=folder, then=then)
    (tmp_path / "test_inner.py").write_text(inner_test)
    name = f"RUN_OF_{tmp_path.name}"  # finds them here, and is not what the reaper looks for
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    inner = subprocess.Popen(
        [*command, "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_inner.py")],
        cwd=ROOT,
        env={**os.environ, name: "1", "PYTEST_DEBUG_TEMPROOT": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: started_file.exists() or inner.poll() is not None, 90, "the inner test runs")
        assert started_file.exists(), f"the inner test ended with {inner.poll()}"
        servers = " ".join(naming(name).values())
        assert "headrace_broker" in servers
        assert ("postgres" in fixtures) == ("initdb" in servers or "postgres" in servers)
        folder = started_file.read_text()
        assert folder == "" or Path(folder).is_dir()
        started_file.unlink()
        if status:
            inner.kill()
        assert inner.wait(60) == status
        wait_until(lambda: not [pid for pid in naming(name) if alive(pid)], 30, "no process remains")
        wait_until(lambda: not (folder and Path(folder).exists()), 30, "no folder remains")
    finally:
        inner.kill()
