"""Order: what an agent was told to be durable is on the bus in that order, an end behind all that it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """First appearances, over all topics, of what was acknowledged to each agent, one after the other."""
    for run, events in cluster.ledger.order.items():
        appeared = [cluster.bus.first[event_id] for event_id in events if event_id in cluster.bus.first]
        that(appeared == sorted(appeared), f"what was acknowledged to {run} is on the bus in another order")
