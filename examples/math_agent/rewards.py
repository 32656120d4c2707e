"""Reward functions for finished trajectories; the scorer loads this file and calls them by name.

The correctness of the answer is scored by `accuracy` of the reward library; this file scores form and length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.rewards import length_penalty
from math_agent.solution import of_trajectory

if TYPE_CHECKING:
    from headrace_schemas import Trajectory

DETOUR = 0.5
"""Reduction of the reward for twice as many steps as needed."""


def form(trajectory: Trajectory) -> float:
    """Return 1 if the whole run has the expected form."""
    return float(of_trajectory(trajectory).in_form)


def brief(trajectory: Trajectory, context: Mapping[str, object]) -> float | None:
    """Return 1 for a run with at most `steps_min` steps, and less for each further step.

    The function abstains if the context has no `steps_min`.
    """
    needed = context.get("steps_min")
    if not isinstance(needed, int | float) or needed <= 0:
        return None
    return length_penalty(1.0, of_trajectory(trajectory).steps, length_max=int(needed), weight=DETOUR)
