"""Schedule of strikes: kinds of faults, victims and pauses, as a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
"""A nemesis, and its victim."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike of a schedule: `nemesis` hits `victim`, `pause_s` after the strike before. `seed` is for the nemesis's
    draws.
    """

    pause_s: float
    nemesis: str
    victim: str
    seed: int


def plan(seed: int, strikes: int, pairs: Sequence[Pair], mean_pause_s: float) -> list[Strike]:
    """Return a schedule of `strikes` strikes. Every pair of nemesis and victim occurs once per round, in random order.

    Pauses are exponentially distributed: often several parts are broken together, and some processes die while they
    start.
    """
    choose = random.Random(seed)
    order = _rounds(choose, pairs)
    return [_strike(choose, next(order), mean_pause_s) for _ in range(strikes)]


def _strike(choose: random.Random, pair: Pair, mean_pause_s: float) -> Strike:
    pause_s = round(min(choose.expovariate(1 / mean_pause_s), 4 * mean_pause_s), 3)
    return Strike(pause_s, *pair, choose.randrange(2**32))


def _rounds(choose: random.Random, pairs: Sequence[Pair]) -> Iterator[Pair]:
    while True:
        yield from choose.sample(pairs, len(pairs))


MACHINES = ("a", "b")
PAIRS = {
    "gateway": "gateway-2",
    "gateway-2": "gateway",
    "inference": "inference-2",
    "inference-2": "inference",
}
"""Twin of each service that has one. While one of the two is down, the other is not hit."""
STREAM = ("collector", "scorer", "judge")
"""Services that run on machine A and, if the database is a server, also on machine B."""
SINGLE = ("trainer", "registry")
BUS = {"embedded": "broker", "kafka": "kafka"}


def services_on(bus: str) -> tuple[str, ...]:
    """Return all services of both machines; names on machine B end with `-2`.

    Two processes cannot share a SQLite file.
    """
    twins = tuple(f"{name}-2" for name in STREAM) if bus == "kafka" else ()
    return (*PAIRS, *STREAM, *twins, *SINGLE)


def victims_on(bus: str) -> tuple[str, ...]:
    return (*services_on(bus), BUS[bus])
