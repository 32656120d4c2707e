"""Promises about captured turns (durable, exact, ordered, accounted for) and about served versions and their routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_operations.turn_account import TurnAccountBuilder
from headrace_runtime.errors import CorruptBlob, Unavailable
from headrace_runtime.kafka.topics import catalogue
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import (
    EVENTS,
    Branch,
    Checkpoint,
    DeadLetter,
    Event,
    Experience,
    Feedback,
    ModelEvent,
    Replica,
    Routing,
    SessionEnd,
    TrainingMetrics,
    Trajectory,
    Turn,
)
from tests.simulation.cluster import lessons
from tests.simulation.services import tokens_digest
from tests.support.training_history import follow

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.program import Check


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


def p1_captured(cluster: Cluster, that: Check) -> None:
    """P1: once a client has received the end of a response, its turn is durable; no outage and no death loses it.

    Check that every acknowledged event is on the bus, unchanged. Spools are empty after a quiet time.
    """
    turns = {turn.turn_id: turn for turn in cluster.log.all(Turn)}
    for turn_id, sent in cluster.ledger.acked.items():
        that(turns.get(turn_id) == sent, f"turn {turn_id} was acknowledged and is not on the bus as it was sent")
    event_ids = {event.event_id for kind in (Turn, Feedback, SessionEnd) for event in cluster.log.all(kind)}
    for run, events in cluster.ledger.order.items():
        for event_id in events:
            # A tenant's commit has a copy with an id of its own in each partition.
            that(
                event_id in event_ids or _copied(cluster, event_id), f"{event_id} of {run} was acknowledged and is lost"
            )


def _copied(cluster: Cluster, event_id: str) -> bool:
    copies = [
        end.model_copy(update={"partition": None}) for end in cluster.log.all(SessionEnd) if end.scope == "tenant"
    ]
    return sum(end.event_id == event_id for end in copies) == len(cluster.bus.partitions_of(SessionEnd.topic))


def p2_tokens(cluster: Cluster, that: Check) -> None:
    """P2: the trained tokens are bit-equal to the sampled ones, with the engine's logprobs, and no others are
    trained.

    Each token is compared from the turn of an agent, by the trajectory, to the rows in the weights of every
    version.
    """
    for trajectory in cluster.log.all(Trajectory):
        for branch in trajectory.branches:
            _spans(cluster, branch, that)
    branches = {(lesson.experience_id, lesson.revision): lesson.branch for lesson in cluster.log.all(Experience)}
    digests = {name: _digest(branch) for name, branch in branches.items() if branch is not None}
    experience_ids = {experience_id for experience_id, _ in digests}
    for version, learned in lessons(cluster).items():
        for lesson in learned:
            # A withdrawal comes without tokens: those of an earlier revision are trained.
            expected = digests.get((lesson.experience_id, lesson.revision))
            earlier = {digest for (name, _), digest in digests.items() if name == lesson.experience_id}
            that(
                lesson.experience_id in experience_ids
                and lesson.tokens_sha256 in ({expected} if expected else earlier),
                f"{version} was trained on other tokens than {lesson.experience_id} has",
            )


def _spans(cluster: Cluster, branch: Branch, that: Check) -> None:
    for span in branch.spans:
        turn = cluster.ledger.requested.get(span.turn_id)
        if not that(turn is not None, f"turn {span.turn_id} was never made"):
            continue
        assert turn is not None
        choice = turn.choices[span.choice]
        that(branch.token_ids[: span.start] == turn.prompt_token_ids, f"prompt of {span.turn_id} differs")
        that(branch.token_ids[span.start : span.stop] == choice.token_ids, f"tokens of {span.turn_id} differ")
        that(span.logprobs == choice.logprobs, f"logprobs of {span.turn_id} differ")


def _digest(branch: Branch) -> str:
    behaviour = [0.0] * len(branch.token_ids)
    for span in branch.spans:
        behaviour[span.start : span.stop] = span.logprobs
    return tokens_digest(list(branch.token_ids), [bool(masked) for masked in branch.loss_mask], behaviour)


def account(cluster: Cluster, that: Check) -> None:
    """The account: every captured turn is either trained, waiting, or dropped for a reason, exactly once.

    Follow each turn through the topics, and compare the result with the account of `headrace status`.
    """
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
    """Return the turns that changed the weights, and the turns that were dropped for a reason."""
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


def order(cluster: Cluster, that: Check) -> None:
    """Order: events that an agent's gateway acknowledged are on the bus in that order, and an end follows all its
    events.

    Compare the first positions, over all topics, of the events acknowledged to each agent.
    """
    for run, events in cluster.ledger.order.items():
        appeared = [cluster.bus.first[event_id] for event_id in events if event_id in cluster.bus.first]
        that(appeared == sorted(appeared), f"what was acknowledged to {run} is on the bus in another order")


def whole_runs(cluster: Cluster, that: Check) -> None:
    """Runs are complete: every turn is in one trajectory, and the end of a run includes all earlier turns.

    Check that only idleness cuts a run in two (decision 2): the collector cannot know that an agent still works. An
    end includes every turn that was acknowledged before it.
    """
    home: dict[str, Trajectory] = {}
    for trajectory in cluster.log.all(Trajectory):
        for turn_id in trajectory.turn_ids:
            other = home.setdefault(turn_id, trajectory).trajectory_id
            that(other == trajectory.trajectory_id, f"turn {turn_id} is in {other} and in {trajectory.trajectory_id}")
    for turn in cluster.log.all(Turn):
        that(turn.turn_id in home, f"turn {turn.turn_id} is in no trajectory")
    for run in cluster.ledger.runs:
        trajectories = {
            home[turn.turn_id].trajectory_id: home[turn.turn_id] for turn in run.turns if turn.turn_id in home
        }
        pieces = sorted(trajectories.values(), key=lambda piece: piece.turns_from or 0)
        left_behind = [piece.end_reason for piece in pieces[:-1] if piece.end_reason != "idle"]
        if run.follows_an_end:  # an end that is read late takes along what was sent after it
            continue
        that(not left_behind, f"{run.name} was cut in {len(pieces)} pieces by {left_behind}")


def equal_facts(cluster: Cluster, that: Check) -> None:
    """Equal facts have equal ids, and events with one id are equal: consumers that dedupe by id lose no event.

    Compare events of every topic. A dead letter's time is left out: a record refused twice has two times.
    """
    for kind in EVENTS.values():
        if kind is Replica:
            continue
        contents: dict[str, bytes] = {}
        for event in (event for partition in cluster.log.partitions(kind) for event in partition):
            content = _content(event)
            first = contents.setdefault(event.event_id, content)
            that(first == content, f"{kind.topic}: {event.event_id} came with two contents")


def _content(event: Event) -> bytes:
    if isinstance(event, DeadLetter):
        return event.model_copy(update={"time": event.time.min.replace(tzinfo=event.time.tzinfo)}).to_json()
    return event.to_json()
