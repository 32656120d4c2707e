"""Access of the replaced parts to the current simulation, of which a real process has exactly one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.database import Server
    from tests.simulation.process import Mishaps

_worlds: list[World] = []


class World(Protocol):
    """Interface of the current simulation: see `tests.simulation.cluster.Cluster`."""

    bus: Bus
    mishaps: Mishaps
    databases: dict[str, Server]
    request_timeout_s: float
    skews_s: dict[str, float]
    """Error of each process's clock in seconds."""

    def count(self, fault: str) -> None:
        """Count a fault that has happened."""


def world() -> World:
    """Return the current simulation."""
    return _worlds[-1]


def enter(world: World) -> None:
    _worlds.append(world)


def leave() -> None:
    _worlds.pop()
