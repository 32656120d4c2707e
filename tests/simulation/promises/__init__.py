"""One checker per promise. Each compares the durable state after a run with the observations from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tests.simulation.promises import (
    account,
    equal_facts,
    order,
    p1_captured,
    p2_tokens,
    p3_versions,
    p4_once,
    p5_staleness,
    p6_abstain,
    p7_immutable,
    p8_routing,
    p9_replay,
    p10_late,
    p11_loud,
    whole_runs,
)
from tests.simulation.promises.check import Check

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

PROMISES: Mapping[str, Callable[[Cluster, Check], None]] = {
    module.__name__.rpartition(".")[2]: module.check
    for module in (
        p1_captured,
        p2_tokens,
        p3_versions,
        p4_once,
        p5_staleness,
        p6_abstain,
        p7_immutable,
        p8_routing,
        p9_replay,
        p10_late,
        p11_loud,
        account,
        order,
        whole_runs,
        equal_facts,
    )
}
"""By name, which is the file's."""


def check_all(cluster: Cluster) -> list[Check]:
    """Check every promise on the result of one run."""
    checks = []
    for name, check in PROMISES.items():
        that = Check(name)
        check(cluster, that)
        checks.append(that)
    return checks


__all__ = ["PROMISES", "Check", "check_all"]
