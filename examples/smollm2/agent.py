"""Run the agent: simulated users ask for facts of their mails, and send the wanted answer afterwards.

    python -m smollm2.agent --base-url http://127.0.0.1:8000/v1 --model mail-agent --tasks 100

The program uses the `openai` package, and also works with any other OpenAI-compatible server, without training.
"""

from __future__ import annotations

import argparse
import asyncio

from openai import AsyncOpenAI, OpenAIError, omit

from example_parts import at_work
from example_parts.react import TEMPERATURE, Episode
from smollm2.mails import Task, is_right, stream


async def ask(client: AsyncOpenAI, model: str, task: Task, max_tokens: int, seed: int | None = None) -> Episode:
    """Ask the model once. Errors of the model or the server are not raised."""
    episode = Episode(messages=task.messages)
    try:
        response = await client.chat.completions.create(
            model=model,
            messages=task.messages,
            temperature=TEMPERATURE,
            max_tokens=max_tokens,
            seed=omit if seed is None else seed,
        )
    except OpenAIError as error:
        episode.failure = f"{type(error).__name__}: {error}"
        return episode
    episode.response_ids.append(response.id)
    episode.answer = response.choices[0].message.content or ""
    return episode


class Users(at_work.Users[Task]):
    """Users with mails."""

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        super().__init__(stream("train", options.seed), options)
        self._client = client

    async def play(self, task: Task) -> Episode:
        return await ask(self._client, self._options.model, task, self._options.max_tokens)

    def accepts(self, task: Task, episode: Episode) -> bool:
        return is_right(episode.answer or "", task.expected)

    async def give_feedback(self, task: Task, episode: Episode, *, accepted: bool) -> None:
        """Send the wanted answer, and no reward, because the scorer computes it."""
        await at_work.end_session(self._client, task, episode, context={"expected": task.expected})


def main() -> None:
    options = at_work.parser("Let simulated users ask for facts of their mails.", "mail-agent").parse_args()
    at_work.report_and_exit(asyncio.run(at_work.run(Users, options)), options.out)


if __name__ == "__main__":
    main()
