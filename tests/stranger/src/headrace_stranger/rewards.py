"""A reward function that scores the use of tools."""

from __future__ import annotations

from headrace_schemas import Trajectory


def calls(trajectory: Trajectory) -> float:
    """Return 1 for a run in which a tool was called, otherwise 0."""
    return float(any(message.tool_calls for message in trajectory.messages))
