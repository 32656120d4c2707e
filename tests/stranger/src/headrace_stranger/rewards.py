"""A reward function that scores the use of tools, and a rubric."""

from __future__ import annotations

from importlib.resources import files

from headrace_judge.rubric import RubricFile
from headrace_schemas import Trajectory

POLITE = RubricFile(files(__package__) / "polite.toml")


def calls(trajectory: Trajectory) -> float:
    """Return 1 for a run in which a tool was called, otherwise 0."""
    return float(any(message.tool_calls for message in trajectory.messages))
