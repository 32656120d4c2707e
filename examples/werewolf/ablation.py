"""Ablation of abilities: scripted werewolves with every set of abilities against scripted villagers.

    python -m werewolf.ablation
    python -m werewolf.ablation --lines

prints the win rate of each set, and with `--lines` the lines of `demo.toml` about it, as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from werewolf.policies import ABILITIES, play
from werewolf.table import deals

GAMES = 4000
WIN_RATE = 0.8
"""Win rate that no single ability reaches. Every pair of abilities is worse than all three."""
_SIGMAS = 1.96

Abilities = tuple[str, ...]


@dataclass(frozen=True)
class WinRate:
    """Win rate over a number of games, with the half width of its 95 % interval."""

    value: float
    games: int

    @property
    def margin(self) -> float:
        return _SIGMAS * math.sqrt(self.value * (1 - self.value) / self.games)

    @property
    def low(self) -> float:
        return self.value - self.margin

    @property
    def high(self) -> float:
        return self.value + self.margin

    def __str__(self) -> str:
        return f"{self.value:.1%} ± {self.margin:.1%}"


def ablation(games: int = GAMES, seed: int = 0) -> dict[Abilities, WinRate]:
    """Return the win rate of every set of abilities, smaller sets first. All sets play the same deals."""
    sets = [chosen for size in range(len(ABILITIES) + 1) for chosen in itertools.combinations(ABILITIES, size)]
    return {chosen: _win_rate(chosen, games, seed) for chosen in sets}


def _win_rate(abilities: Abilities, games: int, seed: int) -> WinRate:
    rng = random.Random(f"ablation {abilities} {seed}")
    games_deals = itertools.islice(deals("warm_up", seed), games)
    return WinRate(sum(play(deal, abilities, rng).wolves_win for deal in games_deals) / games, games)


def lines(rates: Mapping[Abilities, WinRate]) -> Iterator[dict[str, object]]:
    """Yield the acceptance lines: no ability is sufficient alone, and each is necessary."""
    every = rates[ABILITIES]
    for ability in ABILITIES:
        alone, remaining = rates[ability,], tuple(other for other in ABILITIES if other != ability)
        yield _line(f"ablation: {ability} alone", f"< {WIN_RATE:.0%}", alone, alone.high < WIN_RATE)
        missed = rates[remaining]
        yield _line(f"ablation: all but {ability}", f"< {every}", missed, missed.high < every.low)
    yield _line("ablation: all three", f"> {WIN_RATE:.0%}", every, every.low > WIN_RATE)


def _line(name: str, bound: str, rate: WinRate, holds: bool) -> dict[str, object]:
    return {"name": name, "wanted": bound, "found": str(rate), "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often scripted werewolves win, by their abilities.")
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", action="store_true", help="print the acceptance lines as JSON")
    options = parser.parse_args()
    rates = ablation(options.games, options.seed)
    if options.lines:
        for line in lines(rates):
            print(json.dumps(line))
        return
    for abilities, rate in rates.items():
        print(f"{' + '.join(abilities) or 'none':22}{rate}")


if __name__ == "__main__":
    main()
