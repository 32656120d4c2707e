"""Runs are complete: every turn is in one trajectory, and the end of a run includes all earlier turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import Trajectory, Turn

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Check that only idleness cuts a run in two (decision 2): the collector cannot know that an agent still works. An
    end
    includes every turn that was acknowledged before it.
    """
    home: dict[str, Trajectory] = {}
    for trajectory in cluster.log.all(Trajectory):
        for turn_id in trajectory.turn_ids:
            other = home.setdefault(turn_id, trajectory).trajectory_id
            that(other == trajectory.trajectory_id, f"turn {turn_id} is in {other} and in {trajectory.trajectory_id}")
    for turn in cluster.log.all(Turn):
        that(turn.turn_id in home, f"turn {turn.turn_id} is in no trajectory")
    for run in cluster.ledger.runs:
        trajectories = {
            home[turn.turn_id].trajectory_id: home[turn.turn_id] for turn in run.turns if turn.turn_id in home
        }
        pieces = sorted(trajectories.values(), key=lambda piece: piece.turns_from or 0)
        left_behind = [piece.end_reason for piece in pieces[:-1] if piece.end_reason != "idle"]
        if run.follows_an_end:  # an end that is read late takes along what was sent after it
            continue
        that(not left_behind, f"{run.name} was cut in {len(pieces)} pieces by {left_behind}")
