"""The account: every captured turn is trained, waiting or dropped for a reason, and is so once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_cli.account import Books
from headrace_schemas import DeadLetter, Experience, TrainingMetrics, Trajectory, Turn
from tests.support.fates import follow

if TYPE_CHECKING:
    from tests.simulation.promises.check import Check
    from tests.simulation.town import Town


def check(town: Town, that: Check) -> None:
    """By following each turn through the topics here, and by the books that `headrace status` keeps."""
    trained, dropped = _followed(town, that)
    captured = {turn.turn_id for turn in town.log.all(Turn)}
    for turn_id in sorted(captured - trained - dropped):
        that(False, f"turn {turn_id} is neither trained nor dropped and nothing is left to do")
    that(not trained & dropped, f"trained and dropped: {sorted(trained & dropped)[:3]}")
    books = Books({"m": "main"})
    for kind in (Turn, Trajectory, Experience, TrainingMetrics, DeadLetter):
        for event in town.log.all(kind):
            books.add(event)
    closed = books.close()
    that(closed.consistent, f"the books contradict themselves: {closed.problems[:3]}")
    counted = (closed.captured, closed.trained, sum(closed.dropped.values()), sum(closed.waiting.values()))
    mine = (len(captured), len(trained & captured), len(dropped & captured), 0)
    that(counted == mine, f"captured, trained, dropped, waiting are {mine}, the books say {counted}")


def _followed(town: Town, that: Check) -> tuple[set[str], set[str]]:
    """Turns that changed the weights, and those that a reason kept from it."""
    spoken: dict[str, set[str]] = {}
    dropped: set[str] = set()
    for trajectory in town.log.all(Trajectory):
        dropped |= {item.turn_id for item in trajectory.left_out}
        if trajectory.purpose == "eval":
            dropped |= set(trajectory.turn_ids)
    for made in town.log.all(Experience):
        spoken.setdefault(made.experience_id, set()).update(made.turn_ids)
    fates: dict[str, set[bool]] = {}
    for (name, _), fate in follow(town.log.all(TrainingMetrics))[0].items():
        if that(name in spoken, f"{name} has a verdict and was never published"):
            fates.setdefault(name, set()).add(fate == "trained")
    trained = {turn for name, fate in fates.items() if True in fate for turn in spoken[name]}
    dropped |= {turn for name, fate in fates.items() if True not in fate for turn in spoken[name]}
    return trained, dropped
