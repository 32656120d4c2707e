"""Has the six play, one game after the other, and tells how each ended.

    python -m werewolf.agent --base-url http://127.0.0.1:8000/v1 --model werewolf --villagers villager:v1.0 --tasks 100

An ordinary program on the `openai` package; with any other OpenAI-compatible server it works just as well, and nobody
learns anything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools

from openai import AsyncOpenAI

from example_parts import at_work
from example_parts.react import Episode
from werewolf.rules import Deal, Game, deals
from werewolf.table import GameEpisode, Table, winner

VILLAGERS = "villager:v1.0"
"""A registered version by its label, which never moves."""


class Players(at_work.Users[Deal]):
    """Everybody who sits at a table; `options.concurrency` tables at a time."""

    words = ("games", "won by the werewolves")

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        super().__init__(itertools.islice(deals("train", options.seed), options.first, None), options)
        self._client = client
        self._table = Table(client, options.model, options.villagers, options.max_tokens)

    async def play(self, task: Deal) -> GameEpisode:
        return await self._table.play(task)

    def accepts(self, task: Deal, episode: Episode) -> bool:
        return isinstance(episode, GameEpisode) and episode.game is not None and episode.game.wolves_win

    async def say(self, task: Deal, episode: Episode, *, accepted: bool) -> None:
        """What happened, to each wolf's own session, and no reward: those are the scorer's. The villagers' end, too."""
        assert isinstance(episode, GameEpisode)
        assert episode.game is not None
        named = {"ends_session": True, "task_id": task.kind, "run_id": episode.run_id}
        for wolf in task.wolves:
            told = facts(episode.game, wolf)
            await at_work.send_feedback(self._client, msg_ids=episode.spoken[wolf], context=told, **named)
        spoken = [one for name in task.villagers for one in episode.spoken[name]]
        await at_work.send_feedback(self._client, msg_ids=spoken, **named)


def facts(game: Game, wolf: str) -> dict[str, str | None]:
    """What the reward functions need to know of it (`rewards.FACTS`)."""
    return {"winner": winner(game), "player": wolf, "out": game.out, "suspect": game.suspect(wolf)}


def main() -> None:
    parser = at_work.parser("Let six agents play Werewolf, of whom two learn.", "werewolf")
    parser.add_argument("--villagers", default=VILLAGERS, metavar="MODEL", help="who never learns (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="how many games were played before (%(default)s)")
    parser.add_argument("--until", type=int, help="end after so many games with those before, instead of --tasks")
    parser.set_defaults(max_tokens=12)
    options = parser.parse_args()
    if options.until is not None:
        options.tasks = options.until - options.first
    at_work.ended(asyncio.run(at_work.run(Players, options)), options.out)


if __name__ == "__main__":
    main()
