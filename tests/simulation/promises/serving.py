"""Promises about served versions: they never change, routes lead to them, and refusals are reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_runtime.errors import CorruptBlob, Unavailable
from headrace_runtime.kafka.topics import catalogue
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint, DeadLetter, Feedback, ModelEvent, Routing, Trajectory

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises import Check


def p3_versions(cluster: Cluster, that: Check) -> None:
    """P3: every sampled token carries the version that the engine reported for its turn."""
    for trajectory in cluster.log.all(Trajectory):
        for span in (span for branch in trajectory.branches for span in branch.spans):
            turn = cluster.ledger.requested.get(span.turn_id)
            that(turn is not None and turn.version == span.version, f"{span.turn_id} is said to be of {span.version}")


def p7_immutable(cluster: Cluster, that: Check) -> None:
    """P7: an announced version is complete, durable and equal to its digest.

    Check the manifest and the digest of each file of every checkpoint and every routed version.
    """
    announced = {entry.version: entry.manifest for entry in cluster.log.all(Checkpoint)}
    served = {entry.version: entry.manifest for routing in cluster.log.all(Routing) for entry in routing.serve}
    for version, ref in [*announced.items(), *served.items()]:
        try:
            manifest = read_manifest(cluster.blobs, ref)
            for file in manifest.files:
                cluster.blobs.get(file.blob)
        except (CorruptBlob, Unavailable) as error:
            that(False, f"{version} was announced and cannot be read: {error}")
        else:
            that(manifest.version == version, f"{version} is really {manifest.version}")
    that(served.keys() <= announced.keys(), f"served and never published: {served.keys() - announced.keys()}")


def p8_routing(cluster: Cluster, that: Check) -> None:
    """P8, as far as the stream decides it: there is one routing table, and each route leads to a version that can
    serve.

    Check that equal revisions are equal, champions were promoted, and the last champion was not refused.
    """
    contents: dict[int, bytes] = {}
    for partition in cluster.log.partitions(Routing):
        for routing in partition:
            first = contents.setdefault(routing.revision, routing.to_json())
            that(first == routing.to_json(), f"routing revision {routing.revision} was published with two contents")
    decisions = cluster.log.all(ModelEvent)
    promoted = {entry.version for entry in decisions if entry.decision == "promoted"}
    for routing in cluster.log.all(Routing):
        champion = routing.champion
        that(champion is None or champion in promoted, f"{champion} is champion and was never promoted")
        that(champion not in routing.withdrawn, f"{champion} is champion and withdrawn")
        served = {entry.version for entry in routing.serve}
        that(champion is None or champion in served, f"{champion} is champion and no replica shall hold it")
    last = max(cluster.log.all(Routing), key=lambda entry: entry.revision)
    (row,) = cluster.databases["registry"].connection.execute("SELECT champion FROM models").fetchall()
    that(last.champion == row[0], f"the bus shows the champion {last.champion}, the registry knows {row[0]}")


_ABSENT = {"judge", "console"}
"""Services that are not part of the simulation."""
_ONLY_DURING_A_ROLLOUT = {("registry", topic) for topic in ("turns", "trajectories", "rewards", "feedback")}
"""Topics that the registry reads only during a rollout; the simulation has no rollouts."""


def p11_loud(cluster: Cluster, that: Check) -> None:
    """P11: every refusal is reported with its reason, and no process ends unexpectedly.

    Check that each poisoned record, and no other, has one dead letter with its reason from each consumer.
    """
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
