"""The account: every captured turn is trained, waiting or dropped for a reason, and is so once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_operations.turn_account import TurnAccountBuilder
from headrace_schemas import DeadLetter, Experience, TrainingMetrics, Trajectory, Turn
from tests.support.fates import follow

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """By following each turn through the topics here, and by the account that `headrace status` gives."""
    trained, dropped = _followed(cluster, that)
    captured = {turn.turn_id for turn in cluster.log.all(Turn)}
    for turn_id in sorted(captured - trained - dropped):
        that(False, f"turn {turn_id} is neither trained nor dropped and nothing is left to do")
    that(not trained & dropped, f"trained and dropped: {sorted(trained & dropped)[:3]}")
    builder = TurnAccountBuilder({"m": "main"})
    for kind in (Turn, Trajectory, Experience, TrainingMetrics, DeadLetter):
        for event in cluster.log.all(kind):
            builder.add(event)
    closed = builder.close()
    that(closed.consistent, f"the account contradicts itself: {closed.problems[:3]}")
    counted = (closed.captured, closed.trained, sum(closed.dropped.values()), sum(closed.waiting.values()))
    mine = (len(captured), len(trained & captured), len(dropped & captured), 0)
    that(counted == mine, f"captured, trained, dropped, waiting are {mine}, the account says {counted}")


def _followed(cluster: Cluster, that: Check) -> tuple[set[str], set[str]]:
    """Turns that changed the weights, and those that a reason kept from it."""
    turns_of: dict[str, set[str]] = {}
    dropped: set[str] = set()
    for trajectory in cluster.log.all(Trajectory):
        dropped |= {item.turn_id for item in trajectory.left_out}
        if trajectory.purpose == "eval":
            dropped |= set(trajectory.turn_ids)
    for experience in cluster.log.all(Experience):
        turns_of.setdefault(experience.experience_id, set()).update(experience.turn_ids)
    fates: dict[str, set[bool]] = {}
    for (name, _), status in follow(cluster.log.all(TrainingMetrics))[0].items():
        if that(name in turns_of, f"{name} has a verdict and was never published"):
            fates.setdefault(name, set()).add(status == "trained")
    without_logprobs: dict[str, set[str]] = {}
    for report in cluster.log.all(TrainingMetrics):
        for outcome in report.verdicts:
            if outcome.dropped is None:
                left_out = set(outcome.left_out)
                without_logprobs[outcome.experience_id] = (
                    without_logprobs.get(outcome.experience_id, left_out) & left_out
                )
    trained: set[str] = set()
    for name, is_trained in fates.items():
        lacking = without_logprobs.get(name, set()) if True in is_trained else turns_of[name]
        trained |= turns_of[name] - lacking
        dropped |= lacking
    return trained, dropped
