"""P8, as far as the stream decides it: there is one table of routes, and it leads to something that can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import ModelEvent, Routing

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Revisions are one story without contradictions, champions were promoted, and nobody refused is champion last."""
    contents: dict[int, bytes] = {}
    for partition in cluster.log.partitions(Routing):
        for routing in partition:
            first = contents.setdefault(routing.revision, routing.to_json())
            that(first == routing.to_json(), f"routing revision {routing.revision} was published with two contents")
    decisions = cluster.log.all(ModelEvent)
    promoted = {one.version for one in decisions if one.decision == "promoted"}
    for routing in cluster.log.all(Routing):
        champion = routing.champion
        that(champion is None or champion in promoted, f"{champion} is champion and was never promoted")
        that(champion not in routing.withdrawn, f"{champion} is champion and withdrawn")
        served = {one.version for one in routing.serve}
        that(champion is None or champion in served, f"{champion} is champion and no replica shall hold it")
    last = max(cluster.log.all(Routing), key=lambda one: one.revision)
    (row,) = cluster.databases["registry"].connection.execute("SELECT champion FROM models").fetchall()
    that(last.champion == row[0], f"the bus shows the champion {last.champion}, the registry knows {row[0]}")
