"""Runs are whole: every turn is in one trajectory, and one that was acknowledged before its session's end is in that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import Trajectory, Turn

if TYPE_CHECKING:
    from tests.simulation.promises.check import Check
    from tests.simulation.town import Town


def check(town: Town, that: Check) -> None:
    """Only idleness may cut a run in two (decision 3): the collector cannot know that an agent still thinks."""
    home: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for trajectory in town.log.all(Trajectory):
        reasons[trajectory.trajectory_id] = trajectory.end_reason
        for turn_id in trajectory.turn_ids:
            other = home.setdefault(turn_id, trajectory.trajectory_id)
            that(other == trajectory.trajectory_id, f"turn {turn_id} is in {other} and in {trajectory.trajectory_id}")
    for turn in town.log.all(Turn):
        that(turn.turn_id in home, f"turn {turn.turn_id} is in no trajectory")
    for run in town.ledger.runs:
        homes = {home.get(turn.turn_id, "none") for turn in run.turns}
        cut = len(homes) > 1 and "idle" not in {reasons.get(name) for name in homes}
        that(not cut, f"{run.name} was cut in {len(homes)} pieces")
