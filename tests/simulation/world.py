"""The world of the simulated parts, of which a real process has exactly one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.database import Server
    from tests.simulation.process import Mishaps

_worlds: list[World] = []


class World(Protocol):
    """See `tests.simulation.cluster.Cluster`."""

    bus: Bus
    mishaps: Mishaps
    databases: dict[str, Server]
    request_timeout_s: float
    skews_s: dict[str, float]
    """By how much the clock of each process is wrong."""

    def count(self, fault: str) -> None:
        """A fault took place."""


def world() -> World:
    """The one that runs now."""
    return _worlds[-1]


def enter(world: World) -> None:
    _worlds.append(world)


def leave() -> None:
    _worlds.pop()
