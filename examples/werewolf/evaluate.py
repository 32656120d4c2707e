"""Play held-out games against one version of the wolves' model, and print a line of JSON for each.

    python -m werewolf.evaluate --base-url http://127.0.0.1:8000/v1 --model werewolf@0123456789abcdef

The score is whether the wolves win; their three abilities and the game are printed as well.
`example_parts/examining.py` describes the protocol with the gate.
"""

from __future__ import annotations

import argparse
import itertools

from openai import AsyncOpenAI

from example_parts import examining
from example_parts.react import Episode
from werewolf.agent import VILLAGERS
from werewolf.table import Deal, GameEpisode, Table, as_text, deals


class Examination(examining.Examination[Deal]):
    """Examination with deals that occur neither in the warm-up nor in the players' own traffic."""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--villagers",
            default=VILLAGERS,
            metavar="MODEL",
            help="model of the villagers, which is not trained (%(default)s)",
        )
        parser.set_defaults(max_tokens=12)

    def tasks(self, half: examining.Half) -> list[Deal]:
        return list(itertools.islice(deals(half, self.options.seed), self.options.tasks))

    async def play(self, client: AsyncOpenAI, version: str, task: Deal, seed: int) -> GameEpisode:
        return await Table(client, version, self.options.villagers, self.options.max_tokens).play(task, seed)

    def result(self, task: Deal, episode: Episode) -> dict[str, object]:
        assert isinstance(episode, GameEpisode)
        assert episode.game is not None
        game = episode.game
        return {
            "task": task.id,
            "score": float(game.wolves_win),
            "hide": float(game.hid),
            "blame": float(game.blamed),
            "vote": float(game.voted_together),
            "game": as_text(game),
        }


def main() -> None:
    examining.main(Examination, "Play held-out games against versions of the wolves' model.")


if __name__ == "__main__":
    main()
