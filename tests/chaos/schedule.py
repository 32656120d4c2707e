"""Who is killed when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Strike:
    """`victim` gets SIGKILL `pause_s` after the strike before it."""

    pause_s: float
    victim: str


def plan(seed: int, kills: int, victims: Sequence[str], mean_pause_s: float) -> list[Strike]:
    """`kills` strikes. Every victim comes once per round, in an order of its own each round, so that none is spared.

    Pauses are exponential: often several processes are down together, and sometimes one dies while it starts.
    """
    choose = random.Random(seed)
    order = _rounds(choose, victims)
    return [
        Strike(round(min(choose.expovariate(1 / mean_pause_s), 4 * mean_pause_s), 3), next(order)) for _ in range(kills)
    ]


def _rounds(choose: random.Random, victims: Sequence[str]) -> Iterator[str]:
    while True:
        yield from choose.sample(victims, len(victims))
