"""Let six agents play games one after the other, and report how each ended.

    python -m werewolf.agent --base-url http://127.0.0.1:8000/v1 --model werewolf --villagers villager:v1.0 --tasks 100

The program uses the `openai` package, and also works with any other OpenAI-compatible server, without training.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools

from openai import AsyncOpenAI

from example_parts import at_work
from example_parts.react import Episode
from werewolf.table import Deal, Game, GameEpisode, Table, deals, winner

VILLAGERS = "villager:v1.0"
"""A registered version by its label, which never moves."""


class Players(at_work.Users[Deal]):
    """Players of all tables; at most `options.concurrency` tables play at a time."""

    words = ("games", "won by the werewolves")

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        super().__init__(itertools.islice(deals("train", options.seed), options.first, None), options)
        self._client = client
        self._table = Table(client, options.model, options.villagers, options.max_tokens)

    async def play(self, task: Deal) -> GameEpisode:
        return await self._table.play(task)

    def accepts(self, task: Deal, episode: Episode) -> bool:
        return isinstance(episode, GameEpisode) and episode.game is not None and episode.game.wolves_win

    async def give_feedback(self, task: Deal, episode: Episode, *, accepted: bool) -> None:
        """Send the facts of the game to the session of each wolf, without a reward, which the scorer computes. End all
        sessions."""
        assert isinstance(episode, GameEpisode)
        assert episode.game is not None
        named = {"ends_session": True, "task_id": task.kind, "run_id": episode.run_id}
        for wolf in task.wolves:
            context = facts(episode.game, wolf)
            await at_work.send_feedback(
                self._client, msg_ids=episode.response_ids_by_player[wolf], context=context, **named
            )
        response_ids = [response_id for name in task.villagers for response_id in episode.response_ids_by_player[name]]
        await at_work.send_feedback(self._client, msg_ids=response_ids, **named)


def facts(game: Game, wolf: str) -> dict[str, str | None]:
    """Return the facts of a game for the reward functions (`rewards.FACTS`)."""
    return {"winner": winner(game), "player": wolf, "out": game.out, "suspect": game.suspect(wolf)}


def main() -> None:
    parser = at_work.parser("Let six agents play Werewolf, two of which are trained.", "werewolf")
    parser.add_argument(
        "--villagers",
        default=VILLAGERS,
        metavar="MODEL",
        help="model of the villagers, which is not trained (%(default)s)",
    )
    parser.add_argument("--first", type=int, default=0, help="number of earlier games (%(default)s)")
    parser.add_argument("--until", type=int, help="total number of games, including earlier ones; replaces --tasks")
    parser.set_defaults(max_tokens=12)
    options = parser.parse_args()
    if options.until is not None:
        options.tasks = options.until - options.first
    at_work.report_and_exit(asyncio.run(at_work.run(Players, options)), options.out)


if __name__ == "__main__":
    main()
