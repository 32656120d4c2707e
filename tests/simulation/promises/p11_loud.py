"""P11: every refusal is reported with its reason, and no process ends unexpectedly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_runtime.kafka.topics import catalogue
from headrace_schemas import DeadLetter, Feedback

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check

_ABSENT = {"judge", "console"}
"""Services that are not part of the simulation."""
_ONLY_DURING_A_ROLLOUT = {("registry", topic) for topic in ("turns", "trajectories", "rewards", "feedback")}
"""Topics that the registry reads only during a rollout, which the simulation never has."""


def check(cluster: Cluster, that: Check) -> None:
    """Check that each poisoned record, and no other, has one dead letter with its reason from each consumer."""
    for problem in cluster.problems:
        that(False, problem)
    refused: dict[tuple[str, str, int, int], set[str]] = {}
    for letter in cluster.log.all(DeadLetter):
        if letter.reason == "unknown_target" and letter.service == "collector":
            feedback = Feedback.from_json(letter.value)
            that(
                feedback.event_id in cluster.ledger.astray,
                f"feedback {feedback.feedback_id} is said to be about nothing",
            )
            continue
        origin = letter.source_topic, letter.source_partition or 0, letter.source_offset or 0
        expected = cluster.ledger.poison.get(origin)
        that(letter.reason == expected, f"{letter.service} refused {origin} as {letter.reason}: {letter.error}")
        refused.setdefault((letter.service, *origin), set()).add(letter.reason)
    for topic, partition, offset in cluster.ledger.poison:
        for service in set(catalogue()[topic].consumers) - _ABSENT:
            if (service, topic) not in _ONLY_DURING_A_ROLLOUT:
                that(
                    (service, topic, partition, offset) in refused,
                    f"{service} passed over {topic}[{partition}] {offset}",
                )
    letters = [unknown for unknown in cluster.log.all(DeadLetter) if unknown.reason == "unknown_target"]
    that(
        len(letters) == len(cluster.ledger.astray),
        f"{len(cluster.ledger.astray)} feedbacks astray, {len(letters)} letters",
    )
