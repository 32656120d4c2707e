"""P5: no experience older than the bound, in versions, is trained on any path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import Checkpoint, Experience
from tests.simulation.rest import lessons
from tests.simulation.services import MAX_STALENESS

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Check the staleness of each lesson. New lessons of a version were trained when its parent was the head."""
    learned = lessons(cluster)
    checkpoints = cluster.log.all(Checkpoint)
    parents = {checkpoint.version: checkpoint.parent for checkpoint in checkpoints}
    sampled: dict[str, set[str]] = {}
    for experience in cluster.log.all(Experience):
        if experience.branch is not None:
            sampled.setdefault(experience.experience_id, set()).update(span.version for span in experience.branch.spans)
    for version, parent in parents.items():
        if parent is None:
            continue
        for lesson in learned[version][len(learned.get(parent, ())) :]:
            for other in sorted(sampled[lesson.experience_id]):
                distance = _distance(parents, parent, other)
                that(
                    distance is not None and distance <= MAX_STALENESS,
                    f"{version} was trained on {lesson.experience_id}, sampled by {other}, {distance} versions away",
                )


def _distance(parents: dict[str, str | None], version: str, other_version: str) -> int | None:
    """Return the number of edges between two versions in the tree; None when they are in different trees."""
    above: dict[str, int] = {}
    at: str | None = version
    while at is not None:
        above[at] = len(above)
        at = parents.get(at)
    steps, at = 0, other_version
    while at is not None:
        if at in above:
            return above[at] + steps
        steps, at = steps + 1, parents.get(at)
    return None
