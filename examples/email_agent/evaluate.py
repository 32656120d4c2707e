"""Play held-out tasks for the registry's gate, or against one version, and print a line of JSON for each.

    python -m email_agent.evaluate --base-url http://127.0.0.1:8000/v1 --gate
    python -m email_agent.evaluate --base-url http://127.0.0.1:8000/v1 --model email-agent@0123456789abcdef

The questions are about folders and people that do not occur in the agent's own traffic; `--seed` selects them and the
mailbox. `example_parts/examining.py` describes the protocol with the gate.
"""

from __future__ import annotations

import argparse
import itertools

from openai import AsyncOpenAI

from email_agent import mailbox
from email_agent.mailbox import Mailtools, Task, play, stream
from email_agent.rewards import same_answer
from example_parts import examining
from example_parts.react import Episode


class Examination(examining.Examination[Task]):
    """Examination with held-out questions about the mailbox of one seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._box = mailbox.generate(options.seed)
        self._tools = Mailtools(self._box.open())

    def tasks(self, half: examining.Half) -> list[Task]:
        return list(itertools.islice(stream(self._box, half, self.options.seed), self.options.tasks))

    async def play(self, client: AsyncOpenAI, version: str, task: Task, seed: int) -> Episode:
        return await play(client, version, self._tools, task.question, self.options.max_tokens, seed)

    def result(self, task: Task, episode: Episode) -> dict[str, object]:
        score = int(episode.answer is not None and same_answer(episode.answer, task.expected))
        return {"task": task.id, "score": score, "kind": task.kind, "answer": episode.answer, "calls": episode.calls}


def main() -> None:
    examining.main(Examination, "Play held-out tasks against versions of the e-mail agent's model.")


if __name__ == "__main__":
    main()
