"""How good was it? Plain functions over a finished trajectory; the scorer loads this file and calls them by name.

Whether the answer is right says `accuracy` of the reward library, which the scorer has by name. Here are the other two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.rewards import length_penalty
from math_agent.solution import of_trajectory

if TYPE_CHECKING:
    from headrace_schemas import Trajectory

DETOUR = 0.5
"""What is lost where twice as many steps were made as needed."""


def form(trajectory: Trajectory) -> float:
    """1 when all of the run has the form that was asked for."""
    return float(of_trajectory(trajectory).in_form)


def brief(trajectory: Trajectory, context: Mapping[str, object]) -> float | None:
    """1 for a run without a detour, less for each step more than `steps_min` of the context. Fewer earn nothing more.

    Abstains where nobody said how many steps are needed.
    """
    needed = context.get("steps_min")
    if not isinstance(needed, int | float) or needed <= 0:
        return None
    return length_penalty(1.0, of_trajectory(trajectory).steps, length_max=int(needed), weight=DETOUR)
