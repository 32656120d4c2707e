"""Conversations for the warm-up: each of the six seats of scripted games."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from werewolf import policies, talk
from werewolf.rules import Deal, Game

Message = dict[str, Any]


def demonstrate(deal: Deal, rng: random.Random, habits: policies.Habits) -> list[list[Message]]:
    """Return a game of werewolves without abilities, as seen from each of the six seats."""
    game = policies.play(deal, (), rng, habits)
    return [_seen_by(name, game) for name in deal.seats]


def _seen_by(name: str, game: Game) -> list[Message]:
    return list(_messages(name, game))


def _messages(name: str, game: Game) -> Iterator[Message]:
    deal, seat = game.deal, game.deal.seats.index(name)
    yield {"role": "system", "content": talk.role_prompt(deal, name)}
    yield {"role": "user", "content": talk.speaking_prompt(name, game.talk[:seat])}
    yield {"role": "assistant", "content": talk.answer(game.talk[seat])}
    partner = talk.partners_vote(deal, name, game.votes)
    yield {"role": "user", "content": talk.voting_prompt(name, game.talk, *partner)}
    yield {"role": "assistant", "content": game.votes[name] or talk.NOBODY}
