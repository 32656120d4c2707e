"""Does each ability matter? Werewolves by script, with every set of abilities, against villagers by script.

    python -m werewolf.ablation
    python -m werewolf.ablation --lines

prints how often they win with each, and with `--lines` what `demo.toml` promises of it, a line of JSON each.
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
from werewolf.rules import deals

GAMES = 4000
WIN_RATE = 0.8
"""No single ability reaches it alone, and no pair does without losing to all three."""
_SIGMAS = 1.96

Abilities = tuple[str, ...]


@dataclass(frozen=True)
class WinRate:
    """Of so many games, with the half width of its 95 % interval."""

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
    """The win rate with every set of abilities, smaller sets first. All play the same deals."""
    sets = [chosen for size in range(len(ABILITIES) + 1) for chosen in itertools.combinations(ABILITIES, size)]
    return {chosen: _win_rate(chosen, games, seed) for chosen in sets}


def _win_rate(abilities: Abilities, games: int, seed: int) -> WinRate:
    rng = random.Random(f"ablation {abilities} {seed}")
    dealt = itertools.islice(deals("warm_up", seed), games)
    return WinRate(sum(play(deal, abilities, rng).wolves_win for deal in dealt) / games, games)


def lines(found: Mapping[Abilities, WinRate]) -> Iterator[dict[str, object]]:
    """What is promised of the rules: no ability is enough alone, and none can be missed."""
    every = found[ABILITIES]
    for ability in ABILITIES:
        alone, others = found[ability,], tuple(one for one in ABILITIES if one != ability)
        yield _line(f"ablation: {ability} alone", f"< {WIN_RATE:.0%}", alone, alone.high < WIN_RATE)
        missed = found[others]
        yield _line(f"ablation: all but {ability}", f"< {every}", missed, missed.high < every.low)
    yield _line("ablation: all three", f"> {WIN_RATE:.0%}", every, every.low > WIN_RATE)


def _line(name: str, wanted: str, found: WinRate, holds: bool) -> dict[str, object]:
    return {"name": name, "wanted": wanted, "found": str(found), "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description="How often scripted werewolves win, by what they are able to do.")
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", action="store_true", help="what is promised, as lines of JSON")
    options = parser.parse_args()
    found = ablation(options.games, options.seed)
    if options.lines:
        for line in lines(found):
            print(json.dumps(line))
        return
    for abilities, rate in found.items():
        print(f"{' + '.join(abilities) or 'none':22}{rate}")


if __name__ == "__main__":
    main()
