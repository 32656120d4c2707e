"""P3: every sampled token carries the version that the engine reported for its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import Trajectory

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    for trajectory in cluster.log.all(Trajectory):
        for span in (span for branch in trajectory.branches for span in branch.spans):
            turn = cluster.ledger.requested.get(span.turn_id)
            that(turn is not None and turn.version == span.version, f"{span.turn_id} is said to be of {span.version}")
