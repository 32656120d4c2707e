"""P6: abstaining, failing, timing out and withdrawing are not a reward of zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace_schemas import Experience, Reward

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Every part of a total is a score that somebody gave, and the total is their weighted mean and nothing else."""
    scores: dict[tuple[str, str], set[float]] = {}
    for reward in cluster.log.all(Reward):
        that((reward.value is None) == (reward.outcome != "scored"), f"{reward.outcome} with value {reward.value}")
        if reward.value is not None:
            scores.setdefault((reward.trajectory_id, reward.source), set()).add(reward.value)
    for made in cluster.log.all(Experience):
        name = f"{made.experience_id} revision {made.revision}"
        for part in made.parts:
            given = scores.get((made.trajectory_id, part.source), set())
            that(part.value in given, f"{name}: nobody gave the {part.value} of {part.source}")
        if made.reward is None:
            that(not made.parts and made.no_reward is not None, f"{name} has parts and no reward")
        else:
            total = math.fsum(part.value * part.weight for part in made.parts)
            that(
                bool(made.parts) and math.isclose(total, made.reward, abs_tol=1e-9),
                f"{name}: {made.reward} is not {total}",
            )
