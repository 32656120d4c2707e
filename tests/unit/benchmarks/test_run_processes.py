"""Tests of benchmark helpers: child processes, quantiles and disk usage.

The child processes of a benchmark end when the benchmark ends. Quantiles match their definition. The measurement of a
data directory passes within its limits for a small model and reports a limit that is exceeded.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks._disk_use import OVERHEAD_BYTES, Bounds, measure
from benchmarks._run_processes import Summary
from headrace_operations.jobs.checks import CheckReport
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


def test_quantile_is_the_smallest_value_that_the_share_does_not_exceed() -> None:
    seed = 3
    print(f"seed {seed}")
    chance = random.Random(seed)
    for count in range(1, 203):
        summary = Summary.of([chance.random() for _ in range(count)])
        for percent in (0, 1, 50, 95, 99, 100):
            enough = [
                value
                for value in summary.values
                if sum(other <= value for other in summary.values) >= Fraction(percent, 100) * count
            ]
            assert summary.quantile(percent / 100) == min(enough), (count, percent)


def test_token_quantiles_lie_within_the_lengths() -> None:
    assert CheckReport(lengths=[]).spread() == {}
    assert CheckReport(lengths=[7]).spread() == {"least": 7, "median": 7, "95 of 100": 7, "most": 7}
    assert CheckReport(lengths=[100, 200]).spread() == {"least": 100, "median": 150, "95 of 100": 195, "most": 200}
    for count in range(1, 60):
        quantiles = list(CheckReport(lengths=[number * number for number in range(count)]).spread().values())
        assert quantiles == sorted(quantiles), f"{count} lengths"


SHAPE = {"hidden": 64, "layers": 1}


async def test_data_folder_keeps_to_its_bounds_restarts_and_rolls_back(tmp_path: Path) -> None:
    small = 1_000_000
    measured = await measure(tmp_path, 0.0, SHAPE, Bounds(versions_bytes=small, points_bytes=small), versions_min=20)
    assert measured["held"]
    assert measured["bound_mb"] - OVERHEAD_BYTES / 1e6 < 6
    assert measured["peak_mb"] >= measured["end_mb"] > measured["version_mb"]
    assert measured["end_mb"] < 6, "without the room for databases, too"
    assert measured["written_mb"] > 2 * measured["end_mb"], "far more was written than is kept"
    assert measured["restarted_at_step"] == measured["versions"] - 1
    assert len(set(measured["rolled_back_to"])) == 2
