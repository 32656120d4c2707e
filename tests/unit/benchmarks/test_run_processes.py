"""Runs of a benchmark in processes of their own, which end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import alive, naming, wait_until

ROOT = Path(__file__).resolve().parents[3]
SLOW = """
import sys, time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._run_processes import play

@dataclass(frozen=True)
class Job:
    folder: Path

    def result_file(self, parts):
        return parts / "one.json"

def work(job):
    (job.folder / "told").write_text("up")
    time.sleep(600)

if __name__ == "__main__":
    list(play("slow", [Job(Path(sys.argv[1]))], Path(sys.argv[1]) / "parts", 1, work, dict))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc to find them in")
def test_who_kills_a_benchmark_leaves_no_run_behind(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    name = f"RUN_OF_{tmp_path.name}"
    started = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py"), str(tmp_path)],
        env={**os.environ, name: "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (tmp_path / "told").exists() or started.poll() is not None, 60, "a run is played")
        assert len(naming(name)) > 1, "the run has a process of its own"
        started.kill()
        assert started.wait(60) == -9
        wait_until(lambda: not [pid for pid in naming(name) if alive(pid)], 30, "nothing remains")
    finally:
        started.kill()
