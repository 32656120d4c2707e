"""Run the agent on a mailbox: simulated users put questions, and report whether they accept the answers.

    python -m email_agent.agent --base-url http://127.0.0.1:8000/v1 --model email-agent --tasks 100

The program uses the `openai` package. The program knows only the base URL of Headrace and sends its users' feedback
(`users.py`). The program also works with any other OpenAI-compatible server, without training.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from openai import AsyncOpenAI

from email_agent import mailbox
from email_agent.rewards import same_answer
from email_agent.tasks import Task, stream
from email_agent.tools import Mailtools, play
from email_agent.users import SIGNALS, AnsweredQuestion
from example_parts import at_work
from example_parts.react import Episode


class Users(at_work.Users[Task]):
    """Users with questions about the mailbox of one seed."""

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        box = mailbox.generate(options.seed)
        super().__init__(stream(box, "train", options.seed), options)
        self._client = client
        self._tools = Mailtools(box.open())
        self._give_feedback = SIGNALS[options.signal]
        self._draw = random.Random(f"users {options.seed}")

    async def play(self, task: Task) -> Episode:
        options = self._options
        return await play(self._client, options.model, self._tools, task.question, options.max_tokens)

    def accepts(self, task: Task, episode: Episode) -> bool:
        return same_answer(episode.answer or "", task.expected)

    async def give_feedback(self, task: Task, episode: Episode, *, accepted: bool) -> None:
        model = self._options.model
        await self._give_feedback(
            AnsweredQuestion(self._client, model, self._tools, task, episode, accepted, self._draw)
        )


def main() -> None:
    parser = at_work.parser("Let simulated users ask the e-mail agent questions.", "email-agent")
    parser.add_argument("--signal", choices=sorted(SIGNALS), default="rewards", help="kind of feedback (%(default)s)")
    options = parser.parse_args()
    at_work.report_and_exit(asyncio.run(at_work.run(Users, options)), options.out)


if __name__ == "__main__":
    main()
