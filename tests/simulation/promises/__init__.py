"""One checker per promise. Each compares the durable state after a run with the observations from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.promises import serving, training

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_SPELT_OUT = 5


@dataclass
class Check:
    """Result of a checker. Call `that(condition, text)` for every single condition."""

    promise: str
    count: int = 0
    broken: list[str] = field(default_factory=list)
    """Texts of broken conditions. The first few are stored, the others are only counted."""

    def __call__(self, holds: bool, text: str) -> bool:
        self.count += 1
        if not holds and len(self.broken) < _SPELT_OUT:
            self.broken.append(f"{self.promise}: {text}")
        return holds


PROMISES: Mapping[str, Callable[[Cluster, Check], None]] = {
    function.__name__: function
    for function in (
        serving.p1_captured,
        serving.p2_tokens,
        serving.p3_versions,
        training.p4_once,
        training.p5_staleness,
        training.p6_abstain,
        serving.p7_immutable,
        serving.p8_routing,
        training.p9_replay,
        training.p10_late,
        serving.p11_loud,
        serving.account,
        serving.order,
        serving.whole_runs,
        serving.equal_facts,
    )
}
"""Checkers by name."""


def check_all(cluster: Cluster) -> list[Check]:
    """Check every promise on the result of one run."""
    checks = []
    for name, check in PROMISES.items():
        that = Check(name)
        check(cluster, that)
        checks.append(that)
    return checks


__all__ = ["PROMISES", "Check", "check_all"]
