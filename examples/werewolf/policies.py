"""Scripted players: the villager that the base model imitates, and werewolves with any of three abilities.

A werewolf without abilities plays mostly at random: it often reveals its place, and suspects and votes for any player,
including its partner. Sometimes it plays better, because otherwise no better play could be learned. An ability replaces
one of its three random decisions:

- `hide`: it never says that it was in the woods;
- `blame`: it suspects a villager, and one who is already suspected if possible;
- `vote`: the first wolf votes for a suspected villager, and the second wolf votes as the first.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from werewolf.table import NAMES, PLACES, WOODS, Deal, Game, Statement, in_woods, suspected, voters

HIDE, BLAME, VOTE = ABILITIES = ("hide", "blame", "vote")


@dataclass(frozen=True)
class Habits:
    """Probabilities of the players' decisions."""

    honest: float = 0.22
    """A werewolf that does not hide says that it was in the woods."""
    lucky: float = 0.25
    """A werewolf without the ability blames, or votes, well by chance."""
    sees: float = 0.8
    """A villager suspects a player that was in the woods, if there is one."""
    follows: float = 0.3
    """Otherwise, a villager suspects the same player as another one."""
    silent: float = 0.6
    """Otherwise, a villager suspects no player."""
    votes_seen: float = 0.6
    """A villager votes for a player that was in the woods, if there is one."""
    votes_suspect: float = 0.9
    """Otherwise, a villager votes for a suspected player."""


HABITS = Habits()
KEEN = Habits(honest=0.5, lucky=1.0, sees=1.0, follows=1.0, silent=0.6, votes_seen=1.0, votes_suspect=1.0)
"""Habits without hesitation, with werewolves that reveal themselves, so that every game shows the link between talk and
vote."""


def play(deal: Deal, abilities: Collection[str], rng: random.Random, habits: Habits = HABITS) -> Game:
    """Play a whole scripted game."""
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
        """Return the statement of a player after the earlier statements `talk`."""
        if name not in self.deal.wolves:
            return Statement(name, self.rng.choice(PLACES), self._villagers_suspect(name, talk))
        honest = HIDE not in self.abilities and self._does(self.habits.honest)
        blames = BLAME in self.abilities or self._does(self.habits.lucky)
        suspect = self._villager(talk) if blames else self._anybody(name)
        return Statement(name, WOODS if honest else self.rng.choice(PLACES), suspect)

    def vote(self, name: str, talk: Sequence[Statement], votes: Mapping[str, str | None]) -> str | None:
        """Return the vote of a player; `votes` are the earlier votes."""
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
        """Return a villager, and a suspected one if possible."""
        doubted = [name for name in suspected("", talk) if name in self.deal.villagers]
        return self.rng.choice(doubted or self.deal.villagers)

    def _anybody(self, name: str) -> str:
        return self.rng.choice([other for other in NAMES if other != name])

    def _does(self, share: float) -> bool:
        return self.rng.random() < share
