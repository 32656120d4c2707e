"""Order: acknowledged events of an agent are on the bus in that order, an end after everything that it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Compare first positions, over all topics, of the events acknowledged to each agent."""
    for run, events in cluster.ledger.order.items():
        appeared = [cluster.bus.first[event_id] for event_id in events if event_id in cluster.bus.first]
        that(appeared == sorted(appeared), f"what was acknowledged to {run} is on the bus in another order")
