"""Promises about rewards: a missing reward is an abstention, and a late one is a revision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace_schemas import Experience, Feedback, Reward, Trajectory
from tests.simulation.substitutes import right

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises import Check


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
