"""Players by script: the villager whom the base model imitates, and werewolves with any of three abilities.

A werewolf without ability plays mostly at random: it often tells where it was, suspects anybody and votes for anybody,
its partner included. Now and then it does better, or there would be nothing that it could learn from. An ability takes
one of the three decisions out of chance's hands:

- `hide`: it was never in the woods;
- `blame`: it suspects a villager, one who is under suspicion already where there is one;
- `vote`: the first wolf votes for a villager under suspicion, and the second as the first.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from werewolf.rules import NAMES, PLACES, WOODS, Deal, Game, Statement, in_woods, suspected, voters

HIDE, BLAME, VOTE = ABILITIES = ("hide", "blame", "vote")


@dataclass(frozen=True)
class Habits:
    """How often who does what, as shares of the times that it could."""

    honest: float = 0.22
    """A werewolf that does not hide says that it was in the woods."""
    lucky: float = 0.25
    """A werewolf that cannot blame, or vote, does it all the same."""
    sees: float = 0.8
    """A villager suspects the one who was in the woods, if somebody was."""
    follows: float = 0.3
    """Otherwise: a villager suspects whom another one does."""
    silent: float = 0.6
    """Otherwise: a villager suspects nobody."""
    votes_seen: float = 0.6
    """A villager votes for the one who was in the woods, if somebody was."""
    votes_suspect: float = 0.9
    """Otherwise: a villager votes as one of the others suspects."""


HABITS = Habits()
KEEN = Habits(honest=0.5, lucky=1.0, sees=1.0, follows=1.0, silent=0.6, votes_seen=1.0, votes_suspect=1.0)
"""Nobody hesitates, and werewolves give themselves away: what there is to learn from a talk shows in every game."""


def play(deal: Deal, abilities: Collection[str], rng: random.Random, habits: Habits = HABITS) -> Game:
    """A whole game by script."""
    script = _Script(deal, abilities, rng, habits)
    talk: list[Statement] = []
    for name in deal.seats:
        talk.append(script.statement(name, talk))
    votes: dict[str, str | None] = {}
    for name in voters(deal):
        votes[name] = script.vote(name, talk, votes)
    return Game(deal, tuple(talk), votes)


@dataclass(frozen=True)
class _Script:
    deal: Deal
    abilities: Collection[str]
    rng: random.Random
    habits: Habits

    def statement(self, name: str, talk: Sequence[Statement]) -> Statement:
        """What `name` says after `talk`."""
        if name not in self.deal.wolves:
            return Statement(name, self.rng.choice(PLACES), self._villagers_suspect(name, talk))
        honest = HIDE not in self.abilities and self._does(self.habits.honest)
        blames = BLAME in self.abilities or self._does(self.habits.lucky)
        suspect = self._villager(talk) if blames else self._anybody(name)
        return Statement(name, WOODS if honest else self.rng.choice(PLACES), suspect)

    def vote(self, name: str, talk: Sequence[Statement], votes: Mapping[str, str | None]) -> str | None:
        """Whom `name` votes for; `votes` are those before."""
        if name not in self.deal.wolves:
            return self._villagers_vote(name, talk)
        if VOTE not in self.abilities and not self._does(self.habits.lucky):
            return self._anybody(name)
        followed = votes.get(self.deal.partner(name))
        return followed if followed in self.deal.villagers else self._villager(talk)

    def _villagers_suspect(self, name: str, talk: Sequence[Statement]) -> str | None:
        seen, doubted = in_woods(name, talk), suspected(name, talk)
        if seen and self._does(self.habits.sees):
            return self.rng.choice(seen)
        if doubted and self._does(self.habits.follows):
            return self.rng.choice(doubted)
        return None if self._does(self.habits.silent) else self._anybody(name)

    def _villagers_vote(self, name: str, talk: Sequence[Statement]) -> str:
        seen, doubted = in_woods(name, talk), suspected(name, talk)
        if seen and self._does(self.habits.votes_seen):
            return self.rng.choice(seen)
        if doubted and self._does(self.habits.votes_suspect):
            return self.rng.choice(doubted)
        return self._anybody(name)

    def _villager(self, talk: Sequence[Statement]) -> str:
        """One of them, under suspicion where one is."""
        doubted = [name for name in suspected("", talk) if name in self.deal.villagers]
        return self.rng.choice(doubted or self.deal.villagers)

    def _anybody(self, name: str) -> str:
        return self.rng.choice([other for other in NAMES if other != name])

    def _does(self, share: float) -> bool:
        return self.rng.random() < share
