"""P11: nothing is refused in silence, nothing without its reason, and no process ends by a surprise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_runtime.topics import catalogue
from headrace_schemas import DeadLetter, Feedback

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check

_ABSENT = {"judge", "console"}
"""Services that are not part of the simulation."""
_ONLY_DURING_A_ROLLOUT = {("registry", topic) for topic in ("turns", "trajectories", "rewards", "feedback")}
"""What the registry reads only while a share of the sessions is at stake, which the simulation never has."""


def check(cluster: Cluster, that: Check) -> None:
    """Each poisoned record has one dead letter from each consumer of its topic, with the reason; nothing else has."""
    for problem in cluster.problems:
        that(False, problem)
    found: dict[tuple[str, str, int, int], set[str]] = {}
    for letter in cluster.log.all(DeadLetter):
        if letter.reason == "unknown_target" and letter.service == "collector":
            said = Feedback.from_json(letter.value)
            that(said.event_id in cluster.ledger.astray, f"feedback {said.feedback_id} is said to be about nothing")
            continue
        place = letter.source_topic, letter.source_partition or 0, letter.source_offset or 0
        wanted = cluster.ledger.poison.get(place)
        that(letter.reason == wanted, f"{letter.service} refused {place} as {letter.reason}: {letter.error}")
        found.setdefault((letter.service, *place), set()).add(letter.reason)
    for topic, partition, offset in cluster.ledger.poison:
        for service in set(catalogue()[topic].consumers) - _ABSENT:
            if (service, topic) not in _ONLY_DURING_A_ROLLOUT:
                that(
                    (service, topic, partition, offset) in found, f"{service} passed over {topic}[{partition}] {offset}"
                )
    letters = [one for one in cluster.log.all(DeadLetter) if one.reason == "unknown_target"]
    that(
        len(letters) == len(cluster.ledger.astray),
        f"{len(cluster.ledger.astray)} feedbacks astray, {len(letters)} letters",
    )
