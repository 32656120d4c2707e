"""Plays held-out queries: for the registry's gate, or against one version, a line of JSON for each.

    python -m email_search.evaluate --base-url http://127.0.0.1:8000/v1 --gate
    python -m email_search.evaluate --base-url http://127.0.0.1:8000/v1 --model email-search@0123456789abcdef

The score is whether all arguments are right; tool and recall stand beside it. How programs like this one are told what
to play is in `example_parts/examining.py`.
"""

from __future__ import annotations

import argparse
import itertools

from openai import AsyncOpenAI

from email_agent import mailbox
from email_search.queries import Query, stream
from email_search.react import AGENT
from email_search.rewards import recall, scored
from email_search.tools import Searchtools
from example_parts import examining
from example_parts.react import Episode


class Examination(examining.Examination[Query]):
    """Queries that neither the warm-up nor the agent's own traffic has."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._box = mailbox.generate(options.seed)
        self._tools = Searchtools(self._box.open())

    def tasks(self, half: examining.Half) -> list[Query]:
        return list(itertools.islice(stream(self._box, half, self.options.seed), self.options.tasks))

    async def play(self, client: AsyncOpenAI, version: str, task: Query, seed: int) -> Episode:
        return await AGENT.play(client, version, self._tools, task.question, self.options.max_tokens, seed)

    def result(self, task: Query, episode: Episode) -> dict[str, object]:
        score = scored(task, episode.messages)
        found = recall(task, episode.messages)
        return {"task": task.id, "score": score.arguments, "tool": score.tool, "recall": found, "kind": task.kind}


def main() -> None:
    examining.main(Examination, "Play held-out queries against versions of the e-mail search's model.")


if __name__ == "__main__":
    main()
