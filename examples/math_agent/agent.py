"""Run the agent: simulated pupils pose problems, and send the right answer and the number of needed steps.

    python -m math_agent.agent --base-url http://127.0.0.1:8000/v1 --model math-agent --tasks 100

The program uses the `openai` package, and also works with any other OpenAI-compatible server, without training.
"""

from __future__ import annotations

import argparse
import asyncio

from openai import AsyncOpenAI

from example_parts import at_work
from example_parts.react import Episode
from headrace.rewards import accuracy
from math_agent.solution import AGENT, Calculator, Problem, stream


class Users(at_work.Users[Problem]):
    """Pupils with problems."""

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        super().__init__(stream("train", options.seed), options)
        self._client = client
        self._calculator = Calculator()

    async def play(self, task: Problem) -> Episode:
        options = self._options
        return await AGENT.play(self._client, options.model, self._calculator, task.question, options.max_tokens)

    def accepts(self, task: Problem, episode: Episode) -> bool:
        return bool(accuracy(episode.answer or "", float(task.expected)))

    async def give_feedback(self, task: Problem, episode: Episode, *, accepted: bool) -> None:
        """Send the facts that the reward functions need, and no reward, because the scorer computes it."""
        needed = {"expected": task.expected, "steps_min": task.steps_min}
        await at_work.end_session(self._client, task, episode, context=needed)


def main() -> None:
    options = at_work.parser("Let simulated users pose problems to the math agent.", "math-agent").parse_args()
    at_work.report_and_exit(asyncio.run(at_work.run(Users, options)), options.out)


if __name__ == "__main__":
    main()
