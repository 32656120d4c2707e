"""Six agents at a table, each with a conversation of its own: the moderator's prompts, and the one-line answers of
the players.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError, omit

from example_parts.react import TEMPERATURE, Episode
from werewolf.rules import NAMES, PLACES, WOODS, Deal, Game, Statement, in_woods, suspected

CALLS = 2 * len(NAMES)
"""Number of model calls of one game: each player speaks once and votes once."""
NOBODY = "nobody"
SPEAK, VOTE = "Speak.", "Vote."


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
    statements = [f"{_name_with_role(game.deal, statement.name)}: {answer_line(statement)}" for statement in game.talk]
    votes = ", ".join(f"{name} {vote or NOBODY}" for name, vote in game.votes.items())
    return "\n".join([*statements, f"votes: {votes}", f"out: {game.out or NOBODY}; the {winner(game)} win"])


def _name_with_role(deal: Deal, name: str) -> str:
    return f"{name} (werewolf)" if name in deal.wolves else name


class _Play:
    """A game in progress."""

    def __init__(self, table: Table, deal: Deal, episode: GameEpisode, seed: int | None) -> None:
        self._table, self._deal, self._episode, self._seed = table, deal, episode, seed
        self._messages: dict[str, list[Any]] = {
            name: [{"role": "system", "content": role_prompt(deal, name)}] for name in deal.seats
        }
        self._statements: list[Statement] = []
        self._votes: dict[str, str | None] = {}

    async def finish(self) -> Game:
        """Play the game to its end. Raises `OpenAIError`, or a group of them."""
        for name in self._deal.seats:
            answer = await self._ask(name, speaking_prompt(name, self._statements))
            self._statements.append(read_statement(name, answer))
        for name in self._deal.wolves:
            await self._vote(name)
        async with asyncio.TaskGroup() as voting:
            for name in self._deal.villagers:
                voting.create_task(self._vote(name))
        return Game(self._deal, tuple(self._statements), self._votes)

    async def _vote(self, name: str) -> None:
        prompt = voting_prompt(name, self._statements, *partners_vote(self._deal, name, self._votes))
        self._votes[name] = read_name(name, await self._ask(name, prompt))

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


def role_prompt(deal: Deal, name: str) -> str:
    """Return the system prompt of a player."""
    role = f"werewolf with {deal.partner(name)}" if name in deal.wolves else "villager"
    return f"You are {name}, {role}. Say a place and a suspect, then vote."


def speaking_prompt(name: str, talk: Sequence[Statement]) -> str:
    """Return the prompt for a statement. `talk` has the earlier statements."""
    return "\n".join([board(name, talk), SPEAK])


def voting_prompt(
    name: str, talk: Sequence[Statement], partner: str | None = None, partners_vote: str | None = None
) -> str:
    """Return the prompt for a vote. A wolf is informed of the vote of its `partner`, if the partner votes first."""
    partner_line = [] if partner is None else [f"{partner} votes {partners_vote or NOBODY}."]
    return "\n".join([board(name, talk), *partner_line, VOTE])


def board(name: str, talk: Sequence[Statement]) -> str:
    """Return the moderator's summary of a talk for `name`: players in the woods, and suspects, once for each suspicion.

    A small model finds what follows a word, but would not find the speaker of a statement in a whole talk.
    """
    return f"{WOODS}: {_listed(in_woods(name, talk))}\nsuspected: {_listed(suspected(name, talk))}"


def partners_vote(deal: Deal, name: str, votes: Mapping[str, str | None]) -> tuple[str, str | None] | tuple[()]:
    """Return the partner and its vote for the wolf that votes second, and an empty tuple for all others."""
    if name != deal.wolves[-1]:
        return ()
    return deal.partner(name), votes[deal.partner(name)]


def answer_line(statement: Statement) -> str:
    """Return the text of a statement."""
    return f"{statement.place or 'nowhere'}, {statement.suspect or NOBODY}"


def read_statement(name: str, text: str) -> Statement:
    """Parse a statement. Invalid places and names are ignored."""
    stated_place, _, suspect = text.strip().partition(", ")
    return Statement(name, stated_place if stated_place in (*PLACES, WOODS) else None, read_name(name, suspect))


def read_name(name: str, text: str) -> str | None:
    stated_name = text.strip().removesuffix(".")
    return stated_name if stated_name in NAMES and stated_name != name else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or NOBODY
