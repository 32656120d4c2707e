"""P10: late is fine: the last word of every source, in the order in which its calls were acknowledged, is what counts
in the end, and it counts for the run that it was said about. No clock has a part in what is expected here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace_schemas import Experience, Feedback, Reward, Trajectory
from tests.simulation.substitutes import right

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """The newest revision of each experience has the reward that the last words amount to, counted here anew."""
    newest: dict[str, Experience] = {}
    revisions: dict[str, list[int]] = {}
    for made in cluster.log.all(Experience):
        revisions.setdefault(made.experience_id, []).append(made.revision)
        if made.experience_id not in newest or newest[made.experience_id].revision < made.revision:
            newest[made.experience_id] = made
    for name, found in revisions.items():
        that(sorted(found) == list(range(len(found))), f"{name} has revisions {sorted(found)}")
    home = {turn_id: one for one in cluster.log.all(Trajectory) for turn_id in one.turn_ids}
    acked = {turn.turn_id for run in cluster.ledger.runs for turn in run.turns}
    words = _words(cluster, home)
    for trajectory in cluster.log.all(Trajectory):
        if trajectory.purpose == "eval" or acked.isdisjoint(trajectory.turn_ids):
            continue  # of a piece that holds only what nobody was told about, nobody can say what it is worth
        wanted = _reward(cluster, trajectory, words.get(trajectory.trajectory_id, []))
        for index in range(len(trajectory.branches)):
            last = newest.get(Experience.id_of(trajectory.trajectory_id, index))
            that(
                last is not None and _equal(last.reward, wanted),
                f"{trajectory.trajectory_id} is worth {last and last.reward}, the last words amount to {wanted}",
            )
    _verdicts(cluster, that, words)


def _words(cluster: Cluster, home: Mapping[str, Trajectory]) -> dict[str, list[Feedback]]:
    """What was said about each trajectory, in the order of acknowledgement: each word is about what holds the last turn
    that had been acknowledged when it was given, or the turns that it lists."""
    found: dict[str, list[Feedback]] = {}
    for run in cluster.ledger.runs:
        for said in run.feedback:
            listed = [home[turn].trajectory_id for turn in said.feedback.msg_ids if turn in home]
            about = listed or [home[said.after.turn_id].trajectory_id] if said.after.turn_id in home else listed
            for name in dict.fromkeys(about):
                found.setdefault(name, []).append(said.feedback)
    return found


def _verdicts(cluster: Cluster, that: Check, words: Mapping[str, list[Feedback]]) -> None:
    """The ledger of rewards, by value: the last word, and none of what was said about another run."""
    last: dict[str, Reward] = {}
    for reward in cluster.log.all(Reward):
        known = last.get(reward.trajectory_id)
        if reward.source == "feedback" and (known is None or known.revision < reward.revision):
            last[reward.trajectory_id] = reward
    for name in sorted(last.keys() | words.keys()):
        spoken = [one for one in words.get(name, []) if one.value is not None or one.withdrawn]
        found, wanted = last.get(name), spoken[-1] if spoken else None
        if found is None or wanted is None:
            stray = found is not None and found.outcome != "withdrawn"
            that(not stray, f"wrong run: {name} has a verdict of {found and found.value} that was not about it")
            that(wanted is None or found is not None, f"wrong run: {name} lacks its verdict, {wanted and wanted.value}")
            continue
        value = None if wanted.withdrawn else wanted.value
        that(found.value == value, f"wrong last word: {name} was told {found.value}, the last word was {value}")


def _reward(cluster: Cluster, trajectory: Trajectory, said: Sequence[Feedback]) -> float | None:
    words: dict[str, float | None] = {"function:right": right(trajectory)}
    for one in said:
        if one.value is not None or one.withdrawn:
            words["feedback"] = None if one.withdrawn else one.value
    critic = [one for one in cluster.ledger.critic if one.trajectory_id == trajectory.trajectory_id]
    if critic:
        words["critic"] = max(critic, key=lambda one: one.revision).value
    values = [value for value in words.values() if value is not None]
    return math.fsum(values) / len(values) if values else None


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, abs_tol=1e-9)
