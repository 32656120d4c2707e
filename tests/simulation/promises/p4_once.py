"""P4: an experience revision changes a weight lineage at most once, through any crash, and reports say what is so."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from headrace_schemas import Checkpoint, TrainingMetrics
from tests.simulation.rest import lessons, saved_lineage

if TYPE_CHECKING:
    from tests.simulation.promises.check import Check
    from tests.simulation.town import Town


def check(town: Town, that: Check) -> None:
    """Versions remember what they were trained on; reports say what was trained. Each at most once, and the same."""
    learned = lessons(town)
    in_weights: set[tuple[str, int]] = set()
    for version, lesson in learned.items():
        times = Counter((one.experience_id, one.revision) for one in lesson)
        in_weights |= set(times)
        for (name, revision), count in times.items():
            that(count == 1, f"{version} was trained {count} times on {name} revision {revision}")
    reported: Counter[tuple[str, int]] = Counter()
    verdicts: Counter[tuple[str, int]] = Counter()
    for report in town.log.all(TrainingMetrics):
        for verdict in report.verdicts:
            verdicts[verdict.experience_id, verdict.revision] += 1
            reported[verdict.experience_id, verdict.revision] += verdict.dropped is None
    for (name, revision), count in verdicts.items():
        that(count == 1, f"{name} revision {revision} has {count} verdicts")
    trained = {key for key, count in reported.items() if count}
    that(trained == in_weights, f"reported as trained and not in any weights, or the reverse: {trained ^ in_weights}")
    _children(town, that)


def _children(town: Town, that: Check) -> None:
    """A version holds what its parent holds, and something new behind it."""
    learned = lessons(town)
    for checkpoint in town.log.all(Checkpoint):
        if checkpoint.parent is None:
            continue
        mine, theirs = learned[checkpoint.version], learned.get(checkpoint.parent, ())
        that(
            mine[: len(theirs)] == theirs and len(mine) > len(theirs),
            f"{checkpoint.version} does not go on from its parent",
        )
    saved = saved_lineage(town)
    assert saved is not None
    that(
        not saved.waiting or all(item.experience.reward is not None for item in saved.waiting),
        "what waits has a reward",
    )
