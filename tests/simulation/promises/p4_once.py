"""P4: an experience revision changes a weight lineage at most once, through any crash, and reports say what is so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace_schemas import Checkpoint, TrainingMetrics
from tests.simulation.learner import pending_lessons
from tests.simulation.rest import lessons, saved_lineage, saved_optimizer
from tests.support.fates import follow

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Versions remember what they were trained on; reports say what was trained. Each at most once, and the same."""
    learned = lessons(cluster)
    in_weights: set[tuple[str, int]] = set()
    for version, lesson in learned.items():
        times = Counter((one.experience_id, one.revision) for one in lesson)
        in_weights |= set(times)
        for (name, revision), count in times.items():
            that(count == 1, f"{version} was trained {count} times on {name} revision {revision}")
    reports = cluster.log.all(TrainingMetrics)
    fates, wrong = follow(reports)
    that(not wrong, f"reports contradict each other: {wrong[:3]}")
    ever = {(one.experience_id, one.revision) for report in reports for one in report.verdicts if one.dropped is None}
    missing = ever - in_weights - _without_advantages(reports)
    that(not missing, f"reported as trained and not in any weights: {missing}")
    that(in_weights <= ever, f"in the weights and not reported as trained: {in_weights - ever}")
    _head(cluster, that, {key for key, fate in fates.items() if fate == "trained"})
    _children(cluster, that)


def _without_advantages(reports: Iterable[TrainingMetrics]) -> set[tuple[str, int]]:
    """Return what was trained in steps that had no advantage other than 0. It changed no weight, and no later step took
    it along if the weights went back before."""
    still = [report for report in reports if report.metrics.get("zero_advantage_fraction") == 1.0]
    return {(one.experience_id, one.revision) for report in still for one in report.verdicts if one.dropped is None}


def _head(cluster: Cluster, that: Check, trained: set[tuple[str, int]]) -> None:
    """What stays trained is what the weights in training hold, and nothing else is (what was undone is said)."""
    saved = saved_lineage(cluster)
    assert saved is not None
    present = (*lessons(cluster)[saved.head], *pending_lessons(saved_optimizer(cluster)))
    held = {(one.experience_id, one.revision) for one in present}
    that(trained == held, f"the weights hold what no report says, or the reverse: {trained ^ held}")


def _children(cluster: Cluster, that: Check) -> None:
    """A version holds what its parent holds, and something new behind it."""
    learned = lessons(cluster)
    for checkpoint in cluster.log.all(Checkpoint):
        if checkpoint.parent is None:
            continue
        mine, theirs = learned[checkpoint.version], learned.get(checkpoint.parent, ())
        that(
            mine[: len(theirs)] == theirs and len(mine) > len(theirs),
            f"{checkpoint.version} does not go on from its parent",
        )
    saved = saved_lineage(cluster)
    assert saved is not None
    that(
        not saved.waiting or all(item.experience.reward is not None for item in saved.waiting),
        "what waits has a reward",
    )
