"""A reward function."""

from __future__ import annotations

from headrace_schemas import Trajectory


def calls(trajectory: Trajectory) -> float:
    """1 for a run in which a tool was called."""
    return float(any(message.tool_calls for message in trajectory.messages))
