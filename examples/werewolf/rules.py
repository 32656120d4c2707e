"""Rules of the game: one night, one talk, one vote, similar to One Night Ultimate Werewolf. Pure.

At night two of the six players were in the woods. In the morning each states in turn its place and its suspect. Then
all vote secretly, except that the second werewolf knows the vote of the first. The player with the most votes is out;
ties are decided by lot. The village wins if a werewolf is out, and the werewolves win otherwise.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix")
WOLVES = 2
PLACES = ("mill", "inn", "well", "barn")
"""Places of villagers, which liars name as well."""
WOODS = "woods"
"""Place of the werewolves."""
Split = Literal["warm_up", "train", "gate", "audit"]


@dataclass(frozen=True)
class Deal:
    """Seats and roles of the players."""

    id: str
    seats: tuple[str, ...]
    """Players in the order of the talk."""
    wolves: tuple[str, ...]
    """Werewolves in the order of the seats."""
    lots: tuple[str, ...]
    """Order of the players that decides ties: the first one is out."""

    kind = "game"

    @property
    def villagers(self) -> tuple[str, ...]:
        return tuple(name for name in self.seats if name not in self.wolves)

    def partner(self, wolf: str) -> str:
        return next(name for name in self.wolves if name != wolf)


@dataclass(frozen=True)
class Statement:
    """Statement of a player by day. None stands for an invalid place or suspect."""

    name: str
    place: str | None
    suspect: str | None


@dataclass(frozen=True)
class Game:
    """A finished game."""

    deal: Deal
    talk: tuple[Statement, ...]
    """Statements in the order of the seats."""
    votes: Mapping[str, str | None]

    @property
    def out(self) -> str | None:
        """The player that was voted out, or None without any vote."""
        counted = Counter(vote for vote in self.votes.values() if vote is not None)
        most = max(counted.values(), default=0)
        return next((name for name in self.deal.lots if most and counted[name] == most), None)

    @property
    def wolves_win(self) -> bool:
        return self.out not in self.deal.wolves

    def suspect(self, name: str) -> str | None:
        return next(statement.suspect for statement in self.talk if statement.name == name)

    @property
    def hid(self) -> bool:
        """Whether no wolf said that it was in the woods."""
        return all(statement.place in PLACES for statement in self.talk if statement.name in self.deal.wolves)

    @property
    def blamed(self) -> bool:
        """Whether a villager that a wolf suspected was voted out."""
        return self.wolves_win and self.out in {self.suspect(wolf) for wolf in self.deal.wolves} - {None}

    @property
    def voted_together(self) -> bool:
        """Whether both wolves voted for the same villager."""
        votes = {self.votes[wolf] for wolf in self.deal.wolves}
        return len(votes) == 1 and votes <= set(self.deal.villagers)


def deals(split: Split, seed: int) -> Iterator[Deal]:
    """Yield deals of a split without end. Splits share no deal."""
    for number in itertools.count():
        yield deal(split, seed, number)


def deal(split: Split, seed: int, number: int) -> Deal:
    rng = random.Random(f"werewolf {split} {seed} {number}")
    seats, lots = rng.sample(NAMES, len(NAMES)), rng.sample(NAMES, len(NAMES))
    chosen = set(rng.sample(NAMES, WOLVES))
    wolves = tuple(name for name in seats if name in chosen)
    return Deal(f"{split}-{seed}-{number}", tuple(seats), wolves, tuple(lots))


def voters(deal: Deal) -> Sequence[str]:
    """Return the players in the order of their votes: the wolves first."""
    return (*deal.wolves, *deal.villagers)


def in_woods(name: str, talk: Sequence[Statement]) -> list[str]:
    """Return all players except `name` who said that they were in the woods."""
    return [statement.name for statement in talk if statement.place == WOODS and statement.name != name]


def suspected(name: str, talk: Sequence[Statement]) -> list[str]:
    """Return all suspects except `name`, once for each suspicion, so that many suspicions have more weight."""
    return [statement.suspect for statement in talk if statement.suspect is not None and statement.suspect != name]
