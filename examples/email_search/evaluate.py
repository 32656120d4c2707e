"""Play held-out queries for the registry's gate, or against one version, and print a line of JSON for each.

    python -m email_search.evaluate --base-url http://127.0.0.1:8000/v1 --gate
    python -m email_search.evaluate --base-url http://127.0.0.1:8000/v1 --model email-search@0123456789abcdef

The score is whether all arguments are right; tool and recall are printed as well. `example_parts/examining.py`
describes the protocol with the gate.
"""

from __future__ import annotations

import argparse
import itertools

from openai import AsyncOpenAI

from email_agent import mailbox
from email_search.queries import AGENT, Query, Searchtools, stream
from email_search.rewards import recall, score_calls
from example_parts import examining
from example_parts.react import Episode


class Examination(examining.Examination[Query]):
    """Examination with queries that occur neither in the warm-up nor in the agent's own traffic."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._box = mailbox.generate(options.seed)
        self._tools = Searchtools(self._box.open())

    def tasks(self, half: examining.Half) -> list[Query]:
        return list(itertools.islice(stream(self._box, half, self.options.seed), self.options.tasks))

    async def play(self, client: AsyncOpenAI, version: str, task: Query, seed: int) -> Episode:
        return await AGENT.play(client, version, self._tools, task.question, self.options.max_tokens, seed)

    def result(self, task: Query, episode: Episode) -> dict[str, object]:
        score = score_calls(task, episode.messages)
        mails_found = recall(task, episode.messages)
        return {"task": task.id, "score": score.arguments, "tool": score.tool, "recall": mails_found, "kind": task.kind}


def main() -> None:
    examining.main(Examination, "Play held-out queries against versions of the e-mail search's model.")


if __name__ == "__main__":
    main()
