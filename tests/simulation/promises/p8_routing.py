"""P8, as far as the stream decides it: there is one table of routes, and it leads to something that can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import ModelEvent, Routing

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Check that revisions agree, champions were promoted, and the last champion was not refused."""
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
