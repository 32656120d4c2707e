"""P4: a revision changes a weight lineage at most once, through any crash, and reports match the weights."""

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
    """Compare the lessons of versions with the reports of training: each at most once, and equal."""
    learned = lessons(cluster)
    in_weights: set[tuple[str, int]] = set()
    for version, lesson in learned.items():
        times = Counter((entry.experience_id, entry.revision) for entry in lesson)
        in_weights |= set(times)
        for (name, revision), count in times.items():
            that(count == 1, f"{version} was trained {count} times on {name} revision {revision}")
    reports = cluster.log.all(TrainingMetrics)
    fates, wrong = follow(reports)
    that(not wrong, f"reports contradict each other: {wrong[:3]}")
    ever = {
        (entry.experience_id, entry.revision)
        for report in reports
        for entry in report.verdicts
        if entry.dropped is None
    }
    missing = ever - in_weights - _without_advantages(reports)
    that(not missing, f"reported as trained and not in any weights: {missing}")
    that(in_weights <= ever, f"in the weights and not reported as trained: {in_weights - ever}")
    _head(cluster, that, {key for key, status in fates.items() if status == "trained"})
    _children(cluster, that)


def _without_advantages(reports: Iterable[TrainingMetrics]) -> set[tuple[str, int]]:
    """Return the revisions of steps whose advantages were all 0. They changed no weight, and no later step includes
    them
    if the weights went back before.
    """
    still = [report for report in reports if report.metrics.get("zero_advantage_fraction") == 1.0]
    return {
        (verdict.experience_id, verdict.revision)
        for report in still
        for verdict in report.verdicts
        if verdict.dropped is None
    }


def _head(cluster: Cluster, that: Check, trained: set[tuple[str, int]]) -> None:
    """Check that reported and undone revisions agree with the weights in training."""
    saved = saved_lineage(cluster)
    assert saved is not None
    present = (*lessons(cluster)[saved.head], *pending_lessons(saved_optimizer(cluster)))
    present_revisions = {(lesson.experience_id, lesson.revision) for lesson in present}
    that(
        trained == present_revisions,
        f"the weights hold what no report says, or the reverse: {trained ^ present_revisions}",
    )


def _children(cluster: Cluster, that: Check) -> None:
    """Check that a version holds the lessons of its parent, followed by new ones."""
    learned = lessons(cluster)
    for checkpoint in cluster.log.all(Checkpoint):
        if checkpoint.parent is None:
            continue
        own_lessons, parents_lessons = learned[checkpoint.version], learned.get(checkpoint.parent, ())
        that(
            own_lessons[: len(parents_lessons)] == parents_lessons and len(own_lessons) > len(parents_lessons),
            f"{checkpoint.version} does not go on from its parent",
        )
    saved = saved_lineage(cluster)
    assert saved is not None
    that(
        not saved.waiting or all(item.experience.reward is not None for item in saved.waiting),
        "what waits has a reward",
    )
