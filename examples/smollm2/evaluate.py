"""Ask about held-out mails for the registry's gate, or against one version, and print a line of JSON for each.

    python -m smollm2.evaluate --base-url http://127.0.0.1:8000/v1 --gate
    python -m smollm2.evaluate --base-url http://127.0.0.1:8000/v1 --model mail-agent@0123456789abcdef --tasks 200

`example_parts/examining.py` describes the protocol with the gate.
"""

from __future__ import annotations

import itertools

from openai import AsyncOpenAI

from example_parts import examining
from example_parts.react import Episode
from smollm2.agent import ask
from smollm2.mails import Task, is_right, stream


class Examination(examining.Examination[Task]):
    """Examination with mails that do not occur in the agent's own traffic."""

    def tasks(self, half: examining.Half) -> list[Task]:
        return list(itertools.islice(stream(half, self.options.seed), self.options.tasks))

    async def play(self, client: AsyncOpenAI, version: str, task: Task, seed: int) -> Episode:
        return await ask(client, version, task, self.options.max_tokens, seed)

    def result(self, task: Task, episode: Episode) -> dict[str, object]:
        answer = episode.answer or ""
        shown = f"{task.mail}\n\n{task.kind}\n> {answer.strip()}"
        return {"task": task.id, "score": float(is_right(answer, task.expected)), "kind": task.kind, "shown": shown}


def main() -> None:
    examining.main(Examination, "Ask versions of the mail agent's model about held-out mails.")


if __name__ == "__main__":
    main()
