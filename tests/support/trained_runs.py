"""Trained runs, read from the bus by task and run."""

from __future__ import annotations

from collections import defaultdict

from headrace.topics import Range, connected
from headrace_schemas import Experience, TrainingMetrics, Trajectory

Runs = dict[str, dict[str, int]]
"""Task id to run id to the number of its calls."""


async def trained_runs(bus: str) -> Runs:
    """Every run that was trained, whole. A run without a task is under the empty id."""
    trained: set[str] = set()
    async with connected(bus) as topics:
        events = [entry.event async for entry in topics.read(Range(Trajectory.topic))]
        async for entry in topics.read(Range(TrainingMetrics.topic)):
            if isinstance(entry.event, TrainingMetrics):
                trained |= {verdict.experience_id for verdict in entry.event.verdicts if verdict.dropped is None}
    runs: Runs = defaultdict(dict)
    for run in (event for event in events if isinstance(event, Trajectory)):
        if all(Experience.id_of(run.trajectory_id, branch) in trained for branch in range(len(run.branches))):
            runs[run.task_id or ""][run.run_id or ""] = len(run.turn_ids)
    return dict(runs)
