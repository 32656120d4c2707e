"""P6: abstaining, failing, timing out and withdrawing are not a reward of zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace_schemas import Experience, Reward

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Check that every part of a total is a source's score, and that the total is their weighted mean."""
    scores: dict[tuple[str, str], set[float]] = {}
    for reward in cluster.log.all(Reward):
        that((reward.value is None) == (reward.outcome != "scored"), f"{reward.outcome} with value {reward.value}")
        if reward.value is not None:
            scores.setdefault((reward.trajectory_id, reward.source), set()).add(reward.value)
    for experience in cluster.log.all(Experience):
        name = f"{experience.experience_id} revision {experience.revision}"
        for part in experience.parts:
            values = scores.get((experience.trajectory_id, part.source), set())
            that(part.value in values, f"{name}: nobody gave the {part.value} of {part.source}")
        if experience.reward is None:
            that(not experience.parts and experience.no_reward is not None, f"{name} has parts and no reward")
        else:
            total = math.fsum(part.value * part.weight for part in experience.parts)
            that(
                bool(experience.parts) and math.isclose(total, experience.reward, abs_tol=1e-9),
                f"{name}: {experience.reward} is not {total}",
            )
