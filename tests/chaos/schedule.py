"""Schedule of strikes and victims: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
"""A nemesis and its victim."""


@dataclass(frozen=True, slots=True)
class Strike:
    """`nemesis` strikes `victim`, `pause_s` after the strike before it. `seed` is for the nemesis's own draws."""

    pause_s: float
    nemesis: str
    victim: str
    seed: int


def plan(seed: int, strikes: int, pairs: Sequence[Pair], mean_pause_s: float) -> list[Strike]:
    """Return the schedule of `strikes` strikes. Every pair comes once per round, in a random order.

    Pauses are exponential: often several parts are broken together, and sometimes a process dies while it starts.
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
