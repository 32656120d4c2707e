"""P1: once a client has received the end of a response, its turn is durable; no outage and no death loses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import Feedback, SessionEnd, Turn

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Check that every acknowledged event is on the bus, unchanged. Spools are empty after a quiet time."""
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
