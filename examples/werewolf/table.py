"""Six agents at a table, each with a conversation of its own. Nothing here knows who serves their models."""

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
"""Of one game: each speaks once and votes once."""


@dataclass
class GameEpisode(Episode):
    """One game; `game` is None where the server could not be asked to its end."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    game: Game | None = None
    spoken: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in NAMES})
    """Response ids of each of the six."""


@dataclass(frozen=True)
class Table:
    """Who plays: a model for the wolves, another one for the villagers."""

    client: AsyncOpenAI
    wolves: str
    villagers: str
    max_tokens: int

    async def play(self, deal: Deal, seed: int | None = None) -> GameEpisode:
        """A whole game. Never raises for what a model or the server does. With a `seed` as far as possible the same."""
        episode = GameEpisode()
        try:
            game = await _Play(self, deal, episode, seed).over()
        except* OpenAIError as group:
            error = group.exceptions[0]
            episode.failure = f"{type(error).__name__}: {error}"
        else:
            episode.game, episode.answer = game, winner(game)
        episode.response_ids = [one for spoken in episode.spoken.values() for one in spoken]
        return episode


def winner(game: Game) -> str:
    return "werewolves" if game.wolves_win else "villagers"


def shown(game: Game) -> str:
    """For people."""
    said = [f"{_shown(game.deal, one.name)}: {talk.answer(one)}" for one in game.talk]
    votes = ", ".join(f"{name} {vote or talk.NOBODY}" for name, vote in game.votes.items())
    return "\n".join([*said, f"votes: {votes}", f"out: {game.out or talk.NOBODY}; the {winner(game)} win"])


def _shown(deal: Deal, name: str) -> str:
    return f"{name} (werewolf)" if name in deal.wolves else name


class _Play:
    """One game while it goes on."""

    def __init__(self, table: Table, deal: Deal, episode: GameEpisode, seed: int | None) -> None:
        self._table, self._deal, self._episode, self._seed = table, deal, episode, seed
        self._read: dict[str, list[Any]] = {
            name: [{"role": "system", "content": talk.told(deal, name)}] for name in deal.seats
        }
        self._said: list[Statement] = []
        self._votes: dict[str, str | None] = {}

    async def over(self) -> Game:
        """Raises `OpenAIError`, or a group of them."""
        for name in self._deal.seats:
            answer = await self._ask(name, talk.asked_to_speak(name, self._said))
            self._said.append(talk.read_statement(name, answer))
        for name in self._deal.wolves:
            await self._vote(name)
        async with asyncio.TaskGroup() as voting:
            for name in self._deal.villagers:
                voting.create_task(self._vote(name))
        return Game(self._deal, tuple(self._said), self._votes)

    async def _vote(self, name: str) -> None:
        asked = talk.asked_to_vote(name, self._said, *talk.partners_vote(self._deal, name, self._votes))
        self._votes[name] = talk.read_name(name, await self._ask(name, asked))

    async def _ask(self, name: str, text: str) -> str:
        """A message of the moderator, and what the agent answers."""
        read, spoken, table = self._read[name], self._episode.spoken[name], self._table
        read.append({"role": "user", "content": text})
        number = 2 * NAMES.index(name) + len(spoken)
        response = await table.client.chat.completions.create(
            model=table.wolves if name in self._deal.wolves else table.villagers,
            messages=read,
            temperature=TEMPERATURE,
            max_tokens=table.max_tokens,
            seed=omit if self._seed is None else self._seed * CALLS + number,
            extra_headers={
                "X-Session-Id": f"{self._episode.run_id}.{name}",
                "X-Run-Id": self._episode.run_id,
                "X-Task-Id": self._deal.kind,
            },
        )
        spoken.append(response.id)
        answer = response.choices[0].message.content or ""
        read.append({"role": "assistant", "content": answer})
        return answer
