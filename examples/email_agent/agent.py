"""Puts the agent to work on a mailbox: simulated users ask, it answers, and they say whether they accept the answer.

    python -m email_agent.agent --base-url http://127.0.0.1:8000/v1 --model email-agent --tasks 100

An ordinary program on the `openai` package. All that it knows of Headrace is the base URL and what its users say
(`users.py`); with any other OpenAI-compatible server it works just as well, and learns nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from openai import AsyncOpenAI, NotFoundError, OpenAIError

from email_agent import mailbox
from email_agent.react import Episode, play
from email_agent.rewards import same_answer
from email_agent.tally import Tally
from email_agent.tasks import Task, stream
from email_agent.tools import Mailtools
from email_agent.users import SIGNALS, Played


class Users:
    """Everybody who has a question; `concurrency` of them ask at a time."""

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        box = mailbox.generate(options.seed)
        self._client = client
        self._options = options
        self._tools = Mailtools(box.open())
        self._tasks = stream(box, "train", options.seed)
        self._say = SIGNALS[options.signal]
        self._draw = random.Random(f"users {options.seed}")
        self._asked = 0
        self.tally = Tally(options.seed)
        self.had_enough = False
        """Once true, what was asked is still answered, but no new questions come."""

    async def ask(self) -> None:
        """Ask until the tasks are over or the users have had enough."""
        async with asyncio.TaskGroup() as users:
            for _ in range(self._options.concurrency):
                users.create_task(self._ask())

    async def _ask(self) -> None:
        for task in self._questions():
            episode = await play(
                self._client, self._options.model, self._tools, task.question, self._options.max_tokens
            )
            accepted = episode.answer is not None and same_answer(episode.answer, task.expected)
            if episode.failure is None:
                await self._give_feedback(task, episode, accepted=accepted)
            self.tally.count(task.kind, episode, accepted=accepted)

    async def _give_feedback(self, task: Task, episode: Episode, *, accepted: bool) -> None:
        """A server that has no such page is not Headrace: it is asked once, and not again."""
        if self.tally.feedback_refused:
            return
        try:
            options = self._options
            await self._say(Played(self._client, options.model, self._tools, task, episode, accepted, self._draw))
        except NotFoundError:
            self.tally.feedback_refused = True
        except OpenAIError as error:
            self.tally.feedback_failed(error)
        else:
            self.tally.feedback_sent += 1

    def _questions(self) -> Iterator[Task]:
        while not self.had_enough and self._asked != self._options.tasks:
            self._asked += 1
            yield next(self._tasks)


async def run(options: argparse.Namespace) -> Tally:
    """Let the users ask until the tasks or the time are over, or the process is told to end."""
    loop = asyncio.get_running_loop()
    async with AsyncOpenAI(base_url=options.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        users = Users(client, options)

        def enough() -> None:
            users.had_enough = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, enough)
        if options.duration:
            loop.call_later(options.duration, enough)
        with users.tally.told(enabled=sys.stderr.isatty() and not options.quiet):
            await users.ask()
        return users.tally


def main() -> None:
    parser = argparse.ArgumentParser(description="Let simulated users put questions to the e-mail agent.")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--model", default="email-agent")
    parser.add_argument("--tasks", type=int, help="how many questions (default: no end)")
    parser.add_argument("--duration", type=float, metavar="S", help="for how many seconds (default: no end)")
    parser.add_argument("--concurrency", type=int, default=16, help="users who ask at a time (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="which mailbox, and the order of its questions (%(default)s)"
    )
    parser.add_argument("--signal", choices=sorted(SIGNALS), default="rewards", help="what users say (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="per model call; more for models that think aloud")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a summary there, as JSON")
    parser.add_argument("--quiet", action="store_true", help="no moving line on the terminal")
    options = parser.parse_args()
    tally = asyncio.run(run(options))
    print(tally.line())
    if options.out:
        tally.write(options.out)
    if tally.failures:
        sys.exit(f"{tally.failed_requests} requests failed, the first one with: {tally.failures[0]}")


if __name__ == "__main__":
    main()
