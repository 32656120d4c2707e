"""A game of werewolf: its rules, which are pure, and the table at which agents play it.

At night two of the six players were in the woods. In the morning each states in turn its place and its suspect. Then
all vote secretly, except that the second werewolf knows the vote of the first. The player with the most votes is out;
ties are decided by lot. The village wins if a werewolf is out, and the werewolves win otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openai import AsyncOpenAI, OpenAIError, omit

from example_parts.react import TEMPERATURE, Episode

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix")
WOLVES = 2
PLACES = ("mill", "inn", "well", "barn")
"""Places of villagers, which liars name as well."""
WOODS = "woods"
"""Place of the werewolves."""
Split = Literal["warm_up", "train", "gate", "audit"]
CALLS = 2 * len(NAMES)
"""Number of model calls of one game: each player speaks once and votes once."""
NOBODY = "nobody"
SPEAK, VOTE = "Speak.", "Vote."


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
