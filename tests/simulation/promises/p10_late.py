"""P10: late is fine: whatever the order, the last word of every source is what counts in the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace_schemas import Experience, Trajectory
from tests.simulation.ledger import Run
from tests.simulation.substitutes import right

if TYPE_CHECKING:
    from tests.simulation.promises.check import Check
    from tests.simulation.town import Town


def check(town: Town, that: Check) -> None:
    """The newest revision of each experience has the reward that the last words amount to, counted here anew."""
    newest: dict[str, Experience] = {}
    revisions: dict[str, list[int]] = {}
    for made in town.log.all(Experience):
        revisions.setdefault(made.experience_id, []).append(made.revision)
        if made.experience_id not in newest or newest[made.experience_id].revision < made.revision:
            newest[made.experience_id] = made
    for name, found in revisions.items():
        that(sorted(found) == list(range(len(found))), f"{name} has revisions {sorted(found)}")
    trajectories = town.log.all(Trajectory)
    of_key: dict[str, int] = {}
    for trajectory in trajectories:
        of_key[trajectory.session_key] = of_key.get(trajectory.session_key, 0) + 1
    runs = {turn.turn_id: run for run in town.ledger.runs for turn in run.turns}
    for trajectory in trajectories:
        run = next((runs[turn_id] for turn_id in trajectory.turn_ids if turn_id in runs), None)
        if run is None or trajectory.purpose == "eval" or (not run.implied and of_key[trajectory.session_key] > 1):
            continue  # whose feedback it would be is another matter when a session was cut in pieces
        wanted = _reward(town, trajectory, run)
        for index in range(len(trajectory.branches)):
            last = newest.get(Experience.id_of(trajectory.trajectory_id, index))
            that(
                last is not None and _equal(last.reward, wanted),
                f"{trajectory.trajectory_id} is worth {last and last.reward}, the last words amount to {wanted}",
            )


def _reward(town: Town, trajectory: Trajectory, run: Run) -> float | None:
    words: dict[str, float | None] = {"function:right": right(trajectory)}
    for said in sorted(run.feedback, key=lambda one: (one.time, one.feedback_id)):
        words["feedback"] = None if said.withdrawn else said.value
    critic = [one for one in town.ledger.critic if one.trajectory_id == trajectory.trajectory_id]
    if critic:
        words["critic"] = max(critic, key=lambda one: one.revision).value
    values = [value for value in words.values() if value is not None]
    return math.fsum(values) / len(values) if values else None


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, abs_tol=1e-9)
