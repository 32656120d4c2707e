"""Six agents at a table, each with a conversation of its own, independent of the servers of their models."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError, omit

from example_parts.react import TEMPERATURE, Episode
from werewolf import talk
from werewolf.rules import NAMES, Deal, Game, Statement

CALLS = 2 * len(NAMES)
"""Number of model calls of one game: each player speaks once and votes once."""


@dataclass
class GameEpisode(Episode):
    """One game. `game` is None if the server could not be reached until its end."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    game: Game | None = None
    response_ids_by_player: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in NAMES})
    """Response ids of each player."""


@dataclass(frozen=True)
class Table:
    """Models of the players: one for the wolves, another one for the villagers."""

    client: AsyncOpenAI
    wolves: str
    villagers: str
    max_tokens: int

    async def play(self, deal: Deal, seed: int | None = None) -> GameEpisode:
        """Play a whole game. Errors of the model or the server are not raised. With a `seed` the game is as similar as
        possible."""
        episode = GameEpisode()
        try:
            game = await _Play(self, deal, episode, seed).finish()
        except* OpenAIError as group:
            error = group.exceptions[0]
            episode.failure = f"{type(error).__name__}: {error}"
        else:
            episode.game, episode.answer = game, winner(game)
        episode.response_ids = [
            response_id for response_ids in episode.response_ids_by_player.values() for response_id in response_ids
        ]
        return episode


def winner(game: Game) -> str:
    return "werewolves" if game.wolves_win else "villagers"


def as_text(game: Game) -> str:
    """Return the game as text for people."""
    statements = [f"{_name_with_role(game.deal, statement.name)}: {talk.answer(statement)}" for statement in game.talk]
    votes = ", ".join(f"{name} {vote or talk.NOBODY}" for name, vote in game.votes.items())
    return "\n".join([*statements, f"votes: {votes}", f"out: {game.out or talk.NOBODY}; the {winner(game)} win"])


def _name_with_role(deal: Deal, name: str) -> str:
    return f"{name} (werewolf)" if name in deal.wolves else name


class _Play:
    """A game in progress."""

    def __init__(self, table: Table, deal: Deal, episode: GameEpisode, seed: int | None) -> None:
        self._table, self._deal, self._episode, self._seed = table, deal, episode, seed
        self._messages: dict[str, list[Any]] = {
            name: [{"role": "system", "content": talk.role_prompt(deal, name)}] for name in deal.seats
        }
        self._statements: list[Statement] = []
        self._votes: dict[str, str | None] = {}

    async def finish(self) -> Game:
        """Play the game to its end. Raises `OpenAIError`, or a group of them."""
        for name in self._deal.seats:
            answer = await self._ask(name, talk.speaking_prompt(name, self._statements))
            self._statements.append(talk.read_statement(name, answer))
        for name in self._deal.wolves:
            await self._vote(name)
        async with asyncio.TaskGroup() as voting:
            for name in self._deal.villagers:
                voting.create_task(self._vote(name))
        return Game(self._deal, tuple(self._statements), self._votes)

    async def _vote(self, name: str) -> None:
        prompt = talk.voting_prompt(name, self._statements, *talk.partners_vote(self._deal, name, self._votes))
        self._votes[name] = talk.read_name(name, await self._ask(name, prompt))

    async def _ask(self, name: str, text: str) -> str:
        """Send a message of the moderator to a player and return the answer."""
        messages, response_ids, table = self._messages[name], self._episode.response_ids_by_player[name], self._table
        messages.append({"role": "user", "content": text})
        number = 2 * NAMES.index(name) + len(response_ids)
        response = await table.client.chat.completions.create(
            model=table.wolves if name in self._deal.wolves else table.villagers,
            messages=messages,
            temperature=TEMPERATURE,
            max_tokens=table.max_tokens,
            seed=omit if self._seed is None else self._seed * CALLS + number,
            extra_headers={
                "X-Session-Id": f"{self._episode.run_id}.{name}",
                "X-Run-Id": self._episode.run_id,
                "X-Task-Id": self._deal.kind,
            },
        )
        response_ids.append(response.id)
        answer = response.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        return answer
