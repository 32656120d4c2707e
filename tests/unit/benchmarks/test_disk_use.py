"""The program that measures a data folder: its bounds hold with a small model, and a bound that is passed is seen."""

from __future__ import annotations

from pathlib import Path

from benchmarks._disk_use import OVERHEAD_BYTES, Bounds, measure

SHAPE = {"hidden": 64, "layers": 1}


async def test_data_folder_keeps_to_its_bounds_restarts_and_rolls_back(tmp_path: Path) -> None:
    small = 1_000_000
    found = await measure(tmp_path, 0.0, SHAPE, Bounds(versions_bytes=small, points_bytes=small), versions_min=20)
    assert found["held"]
    assert found["bound_mb"] - OVERHEAD_BYTES / 1e6 < 6
    assert found["peak_mb"] >= found["end_mb"] > found["version_mb"]
    assert found["end_mb"] < 6, "without the room for databases, too"
    assert found["written_mb"] > 2 * found["end_mb"], "far more was written than is kept"
    assert found["restarted_at_step"] == found["versions"] - 1
    assert len(set(found["rolled_back_to"])) == 2
