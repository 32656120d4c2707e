"""The reward function. The scorer loads this file and calls the function for each finished session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from smollm2.mails import is_right

if TYPE_CHECKING:
    from headrace_schemas import Trajectory


def right(trajectory: Trajectory, context: Mapping[str, object]) -> float | None:
    """Return 1 for exactly the wanted answer, else 0. The function abstains if the users sent no answer."""
    expected = context.get("expected")
    return float(is_right(trajectory.final_answer, expected)) if isinstance(expected, str) else None
