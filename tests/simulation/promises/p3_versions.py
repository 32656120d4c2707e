"""P3: every sampled token carries the version that the engine reported for its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import Trajectory

if TYPE_CHECKING:
    from tests.simulation.promises.check import Check
    from tests.simulation.town import Town


def check(town: Town, that: Check) -> None:
    for trajectory in town.log.all(Trajectory):
        for span in (span for branch in trajectory.branches for span in branch.spans):
            turn = town.ledger.asked.get(span.turn_id)
            that(turn is not None and turn.version == span.version, f"{span.turn_id} is said to be of {span.version}")
