"""Conversations for the warm-up: each of the six seats of games that are played by script."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from werewolf import policies, talk
from werewolf.rules import Deal, Game

Message = dict[str, Any]


def demonstrate(deal: Deal, rng: random.Random, habits: policies.Habits) -> list[list[Message]]:
    """A game of werewolves without any ability, as each of the six saw it."""
    game = policies.play(deal, (), rng, habits)
    return [_seen_by(name, game) for name in deal.seats]


def _seen_by(name: str, game: Game) -> list[Message]:
    return list(_messages(name, game))


def _messages(name: str, game: Game) -> Iterator[Message]:
    deal, place = game.deal, game.deal.seats.index(name)
    yield {"role": "system", "content": talk.told(deal, name)}
    yield {"role": "user", "content": talk.asked_to_speak(name, game.talk[:place])}
    yield {"role": "assistant", "content": talk.answer(game.talk[place])}
    known = talk.partners_vote(deal, name, game.votes)
    yield {"role": "user", "content": talk.asked_to_vote(name, game.talk, *known)}
    yield {"role": "assistant", "content": game.votes[name] or talk.NOBODY}
