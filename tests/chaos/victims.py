"""Possible victims of strikes."""

from __future__ import annotations

MACHINES = ("a", "b")
PAIRS = {
    "gateway": "gateway-2",
    "gateway-2": "gateway",
    "inference": "inference-2",
    "inference-2": "inference",
}
"""While one of a pair is down, the other is spared."""
STREAM = ("collector", "scorer", "judge")
"""Services that run on machine A and, with a database server, on machine B too."""
SINGLE = ("trainer", "registry")
BUS = {"embedded": "broker", "kafka": "kafka"}


def services_on(bus: str) -> tuple[str, ...]:
    """Every service of both machines; `-2` is machine B's. Two processes cannot share a SQLite file."""
    twins = tuple(f"{name}-2" for name in STREAM) if bus == "kafka" else ()
    return (*PAIRS, *STREAM, *twins, *SINGLE)


def victims_on(bus: str) -> tuple[str, ...]:
    return (*services_on(bus), BUS[bus])
