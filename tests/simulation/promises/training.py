"""Promises about rewards and training: a late reward is a revision, each experience is trained once and in time, and
a replay gives equal batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace_schemas import Checkpoint, Experience, Feedback, ModelEvent, Reward, TrainingMetrics, Trajectory
from headrace_schemas.events.checkpoint import PartitionRead
from headrace_schemas.programs import RecordedBatch, recorded_batches
from headrace_trainer.replay import DryRun
from tests.simulation.cluster import lessons, saved_lineage, saved_optimizer
from tests.simulation.services import MAX_STALENESS, TRAINER, pending_lessons
from tests.simulation.substitutes import right
from tests.support.training_history import follow

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.program import Check


def p4_once(cluster: Cluster, that: Check) -> None:
    """P4: a revision changes a weight lineage at most once, through any crash, and reports match the weights.

    Compare the lessons of versions with the reports of training: each at most once, and equal.
    """
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
    """Return the revisions of steps whose advantages were all 0.

    Such a step changes no weight, and no later step includes its revisions if the weights were rolled back before.
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
    """Check that each version has the lessons of its parent, followed by new ones."""
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


def p5_staleness(cluster: Cluster, that: Check) -> None:
    """P5: no experience older than the bound, in versions, is trained on any path.

    Check the staleness of each lesson. New lessons of a version were trained when its parent was the head.
    """
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


def p9_replay(cluster: Cluster, that: Check) -> None:
    """P9: trained batches can be built again from the topics, byte for byte.

    Play a dry run of the lineage from its own journal, in the order in which its trainers had read.

    The dry run is made twice: with the recorded cuts of each batch, as a replay is, and without them, so that
    derived cuts are compared too. A refused version takes the weights back, which no replay follows: batches are
    compared up to it.
    """
    reports = _reports(cluster)
    _compare(cluster, that, recorded_batches(reports))
    _compare(cluster, that, ())


def _compare(cluster: Cluster, that: Check, recorded: Sequence[RecordedBatch]) -> None:
    batches = [batch for report in _reports(cluster) for batch in report.batches]
    straight = _straight_until(cluster)
    settings = TRAINER.model_copy(update={"lineage": "again", "replays": "main", "cut": "recorded"})
    dry_run = DryRun(settings, cluster.blobs)
    for batch in recorded:
        dry_run.expect(batch)
    for experience, marks in _journal(cluster):
        dry_run.add(experience, marks)
    again = dry_run.end().batches
    for original, planned in zip(batches, again, strict=False):
        if original.step < straight:
            that(
                (original.digest, original.experiences) == (planned.digest, planned.experiences),
                f"the batch of step {original.step} comes out differently",
            )
    enough = [batch for batch in batches if batch.step < straight]
    that(len(again) >= len(enough), f"{len(enough)} batches were trained, {len(again)} come out")


def _reports(cluster: Cluster) -> list[TrainingMetrics]:
    return sorted(cluster.log.all(TrainingMetrics), key=lambda report: report.account)


def _journal(cluster: Cluster) -> Iterator[tuple[Experience, tuple[int, ...]]]:
    """Yield the experiences in the order of reading, each with the sizes of the batches that were cut after it.

    A batch that was cut after the waiting time may follow a save, and so come long after its last experience was read.
    """
    position: dict[int, int] = {}
    last: Experience | None = None
    cuts: tuple[int, ...] = ()
    for report in _reports(cluster):
        for read, cut in [*((batch.read, (batch.experiences,)) for batch in report.batches), (report.read, ())]:
            for event in _experiences(cluster, read, position):
                if last is not None:
                    yield last, cuts
                last, cuts = event, ()
            cuts += cut
    if last is not None:
        yield last, cuts


def _experiences(cluster: Cluster, reads: tuple[PartitionRead, ...], position: dict[int, int]) -> Iterator[Experience]:
    for read in reads:
        for event in cluster.log.raw(Experience, read.partition)[position.get(read.partition, 0) : read.until]:
            if event is not None:
                yield event
        position[read.partition] = read.until


def _straight_until(cluster: Cluster) -> int:
    """Return the first step that a refused version may have influenced.

    That is the step of the first version whose parent is not the version before it, or that was reported after a
    refusal. The versions alone do not show it, because a later promotion may have restored the weights.
    """
    versions = sorted(cluster.log.all(Checkpoint), key=lambda checkpoint: checkpoint.step)
    before = [None, *(checkpoint.version for checkpoint in versions)]
    turned = [
        checkpoint.step for checkpoint, parent in zip(versions, before, strict=False) if checkpoint.parent != parent
    ]
    taken_back = ("rejected", "withdrawn", "rolled_back")
    at = cluster.bus.first
    refused = min(
        (at[checkpoint.event_id] for checkpoint in cluster.log.all(ModelEvent) if checkpoint.decision in taken_back),
        default=None,
    )
    late = (
        []
        if refused is None
        else [checkpoint for checkpoint in _reports(cluster) if at[checkpoint.event_id] >= refused]
    )
    return min([*turned, *(batch.step for report in late for batch in report.batches)], default=1 << 30)


def p6_abstain(cluster: Cluster, that: Check) -> None:
    """P6: abstaining, failing, timing out and withdrawing are not a reward of zero.

    Check that every part of a total is a source's score, and that the total is their weighted mean.
    """
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


def p10_late(cluster: Cluster, that: Check) -> None:
    """P10: late feedback counts. The last value of each source decides, for the run that it is about.

    The order of acknowledgement defines what is last; no clock takes part. Compare the newest revision of each
    experience with a reward computed from these values.
    """
    newest: dict[str, Experience] = {}
    revisions: dict[str, list[int]] = {}
    for experience in cluster.log.all(Experience):
        revisions.setdefault(experience.experience_id, []).append(experience.revision)
        if experience.experience_id not in newest or newest[experience.experience_id].revision < experience.revision:
            newest[experience.experience_id] = experience
    for name, revision in revisions.items():
        that(sorted(revision) == list(range(len(revision))), f"{name} has revisions {sorted(revision)}")
    home = {turn_id: other for other in cluster.log.all(Trajectory) for turn_id in other.turn_ids}
    acked = {turn.turn_id for run in cluster.ledger.runs for turn in run.turns}
    words = _words(cluster, home)
    for trajectory in cluster.log.all(Trajectory):
        if trajectory.purpose == "eval" or acked.isdisjoint(trajectory.turn_ids):
            continue  # of a piece that holds only what nobody was told about, nobody can say what it is worth
        expected = _reward(cluster, trajectory, words.get(trajectory.trajectory_id, []))
        for index in range(len(trajectory.branches)):
            last = newest.get(Experience.id_of(trajectory.trajectory_id, index))
            that(
                last is not None and _equal(last.reward, expected),
                f"{trajectory.trajectory_id} is worth {last and last.reward}, the last words amount to {expected}",
            )
    _verdicts(cluster, that, words)


def _words(cluster: Cluster, home: Mapping[str, Trajectory]) -> dict[str, list[Feedback]]:
    """Return the feedback about each trajectory, in the order of acknowledgement.

    Feedback is about the trajectory of the turns that it lists, otherwise of the turn that was acknowledged last before
    it.
    """
    words: dict[str, list[Feedback]] = {}
    for run in cluster.ledger.runs:
        for feedback in run.feedback:
            listed = [home[turn].trajectory_id for turn in feedback.feedback.msg_ids if turn in home]
            about = listed or [home[feedback.after.turn_id].trajectory_id] if feedback.after.turn_id in home else listed
            for name in dict.fromkeys(about):
                words.setdefault(name, []).append(feedback.feedback)
    return words


def _verdicts(cluster: Cluster, that: Check, words: Mapping[str, list[Feedback]]) -> None:
    """Compare the values of all rewards with the last feedback about each run."""
    last: dict[str, Reward] = {}
    for reward in cluster.log.all(Reward):
        newest = last.get(reward.trajectory_id)
        if reward.source == "feedback" and (newest is None or newest.revision < reward.revision):
            last[reward.trajectory_id] = reward
    for name in sorted(last.keys() | words.keys()):
        last_words = [feedback for feedback in words.get(name, []) if feedback.value is not None or feedback.withdrawn]
        actual, expected = last.get(name), last_words[-1] if last_words else None
        if actual is None or expected is None:
            stray = actual is not None and actual.outcome != "withdrawn"
            that(not stray, f"wrong run: {name} has a verdict of {actual and actual.value} that was not about it")
            that(
                expected is None or actual is not None,
                f"wrong run: {name} lacks its verdict, {expected and expected.value}",
            )
            continue
        value = None if expected.withdrawn else expected.value
        that(actual.value == value, f"wrong last word: {name} was told {actual.value}, the last word was {value}")


def _reward(cluster: Cluster, trajectory: Trajectory, words_given: Sequence[Feedback]) -> float | None:
    words: dict[str, float | None] = {"function:right": right(trajectory)}
    for feedback in words_given:
        if feedback.value is not None or feedback.withdrawn:
            words["feedback"] = None if feedback.withdrawn else feedback.value
    critic = [feedback for feedback in cluster.ledger.critic if feedback.trajectory_id == trajectory.trajectory_id]
    if critic:
        words["critic"] = max(critic, key=lambda feedback: feedback.revision).value
    values = [value for value in words.values() if value is not None]
    return math.fsum(values) / len(values) if values else None


def _equal(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, abs_tol=1e-9)
