"""The rules: one night, one talk, one vote, in the manner of One Night Ultimate Werewolf. Pure.

By night two of the six were in the woods. In the morning each says in turn where they were and whom they suspect; then
all vote in secret, but that the second werewolf is told what the first one does. Who has most votes is out, by lot
where several have. The village wins when a werewolf is out, the werewolves when none is.
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
"""Where villagers were; one who lies says one of these."""
WOODS = "woods"
"""Where the werewolves were."""
Split = Literal["warm_up", "train", "gate", "audit"]


@dataclass(frozen=True)
class Deal:
    """Who sits where, and who is what."""

    id: str
    seats: tuple[str, ...]
    """In the order of the talk."""
    wolves: tuple[str, ...]
    """In the order of the seats."""
    lots: tuple[str, ...]
    """Of several with the most votes the one that comes first here is out."""

    kind = "game"

    @property
    def villagers(self) -> tuple[str, ...]:
        return tuple(name for name in self.seats if name not in self.wolves)

    def partner(self, wolf: str) -> str:
        return next(name for name in self.wolves if name != wolf)


@dataclass(frozen=True)
class Statement:
    """What one of the six said by day. None: nothing that is a place, or a name of somebody else."""

    name: str
    place: str | None
    suspect: str | None


@dataclass(frozen=True)
class Game:
    """One game that is over."""

    deal: Deal
    talk: tuple[Statement, ...]
    """In the order of the seats."""
    votes: Mapping[str, str | None]

    @property
    def out(self) -> str | None:
        """Who was voted out. Nobody where nobody voted for anybody."""
        counted = Counter(vote for vote in self.votes.values() if vote is not None)
        most = max(counted.values(), default=0)
        return next((name for name in self.deal.lots if most and counted[name] == most), None)

    @property
    def wolves_win(self) -> bool:
        return self.out not in self.deal.wolves

    def suspect(self, name: str) -> str | None:
        return next(said.suspect for said in self.talk if said.name == name)

    @property
    def hid(self) -> bool:
        """Neither wolf gave itself away by what it said of the night."""
        return all(said.place in PLACES for said in self.talk if said.name in self.deal.wolves)

    @property
    def blamed(self) -> bool:
        """The village voted out one of its own whom a wolf had named."""
        return self.wolves_win and self.out in {self.suspect(wolf) for wolf in self.deal.wolves} - {None}

    @property
    def voted_together(self) -> bool:
        """Both wolves voted for the same villager."""
        votes = {self.votes[wolf] for wolf in self.deal.wolves}
        return len(votes) == 1 and votes <= set(self.deal.villagers)


def deals(split: Split, seed: int) -> Iterator[Deal]:
    """Deals without end; each split has its own."""
    for number in itertools.count():
        yield deal(split, seed, number)


def deal(split: Split, seed: int, number: int) -> Deal:
    rng = random.Random(f"werewolf {split} {seed} {number}")
    seats, lots = rng.sample(NAMES, len(NAMES)), rng.sample(NAMES, len(NAMES))
    chosen = set(rng.sample(NAMES, WOLVES))
    wolves = tuple(name for name in seats if name in chosen)
    return Deal(f"{split}-{seed}-{number}", tuple(seats), wolves, tuple(lots))


def voters(deal: Deal) -> Sequence[str]:
    """In the order in which they vote: the wolves first, one after the other."""
    return (*deal.wolves, *deal.villagers)


def in_woods(name: str, talk: Sequence[Statement]) -> list[str]:
    """All but `name` who said that they were there."""
    return [said.name for said in talk if said.place == WOODS and said.name != name]


def suspected(name: str, talk: Sequence[Statement]) -> list[str]:
    """All but `name`, once for each who suspects them: many suspicions weigh more."""
    return [said.suspect for said in talk if said.suspect is not None and said.suspect != name]
