"""Users at work: they ask at the same time, an agent answers, and they say what they think of the answer.

All that a program made of this knows of Headrace is the base URL and what its users say. With any other
OpenAI-compatible server it works just as well, and learns nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, NotFoundError, OpenAIError

from example_parts.react import Episode
from example_parts.tally import Tally


class Asked(Protocol):
    """What somebody asks about."""

    @property
    def kind(self) -> str:
        """What it is counted as."""


async def send_feedback(client: AsyncOpenAI, **said: Any) -> None:
    """Raises `OpenAIError`."""
    await client.post("/feedback", body={"feedback_id": uuid.uuid4().hex, **said}, cast_to=object)


async def end_session(client: AsyncOpenAI, task: Asked, episode: Episode, **said: Any) -> None:
    """Close the run; `said` is about all of it. Raises `OpenAIError`."""
    named = {"msg_ids": episode.response_ids, "ends_session": True, "task_id": task.kind}
    await send_feedback(client, **named, **said)


T = TypeVar("T", bound=Asked)


class Users(ABC, Generic[T]):
    """Everybody who has a question; `options.concurrency` of them ask at a time, `options.tasks` questions in all."""

    words = ("questions", "of the answers accepted")
    """What is counted, and what a share of it is."""

    def __init__(self, tasks: Iterator[T], options: argparse.Namespace) -> None:
        self._tasks = tasks
        self._options = options
        self._asked = 0
        self.tally = Tally(options.seed, *self.words)
        self.had_enough = False
        """Once true, what was asked is still answered, but no new questions come."""

    @abstractmethod
    async def play(self, task: T) -> Episode:
        """Have the agent answer. Raises nothing that the model or the server does."""

    @abstractmethod
    def accepts(self, task: T, episode: Episode) -> bool:
        """Whether the users take the answer."""

    @abstractmethod
    async def say(self, task: T, episode: Episode, *, accepted: bool) -> None:
        """Give feedback and end the session. Raises `OpenAIError`."""

    async def ask(self) -> None:
        """Ask until the tasks are over or the users have had enough."""
        async with asyncio.TaskGroup() as users:
            for _ in range(self._options.concurrency):
                users.create_task(self._ask())

    async def _ask(self) -> None:
        for task in self.questions():
            await self.attend(task)

    def questions(self) -> Iterator[T]:
        """What is asked next, by whoever is free."""
        while not self.had_enough and self._asked != self._options.tasks:
            self._asked += 1
            yield next(self._tasks)

    async def attend(self, task: T) -> None:
        """One question, from the asking to what is said of the answer."""
        episode = await self.play(task)
        accepted = episode.answer is not None and self.accepts(task, episode)
        if episode.failure is None:
            await self.give(lambda: self.say(task, episode, accepted=accepted))
        self.tally.count(task.kind, episode, accepted=accepted)

    async def give(self, feedback: Callable[[], Awaitable[None]]) -> None:
        """A server that has no such page is not Headrace: it is asked once, and not again."""
        if self.tally.feedback_refused:
            return
        try:
            await feedback()
        except NotFoundError:
            self.tally.feedback_refused = True
        except OpenAIError as error:
            self.tally.feedback_failed(error)
        else:
            self.tally.feedback_sent += 1


async def run(users_of: Callable[[AsyncOpenAI, argparse.Namespace], Users[Any]], options: argparse.Namespace) -> Tally:
    """Let the users ask until the tasks or the time are over, or the process is told to end."""
    loop = asyncio.get_running_loop()
    direct = DefaultAsyncHttpxClient(trust_env=False)  # the gateway is not behind a proxy of the environment
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=options.base_url, api_key=key, http_client=direct) as client:
        users = users_of(client, options)

        def enough() -> None:
            users.had_enough = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, enough)
        if options.duration:
            loop.call_later(options.duration, enough)
        with users.tally.told(enabled=sys.stderr.isatty() and not options.quiet):
            await users.ask()
        return users.tally


def parser(description: str, model: str) -> argparse.ArgumentParser:
    """The options that every agent of the examples has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--model", default=model)
    parser.add_argument("--tasks", type=int, help="how many questions (default: no end)")
    parser.add_argument("--duration", type=float, metavar="S", help="for how many seconds (default: no end)")
    parser.add_argument("--concurrency", type=int, default=16, help="users who ask at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which questions, and their order (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="per model call; more for models that think aloud")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a summary there, as JSON")
    parser.add_argument("--quiet", action="store_true", help="no moving line on the terminal")
    return parser


def ended(tally: Tally, out: Path | None) -> None:
    """Tell what was done. Exits with a message when requests failed."""
    print(tally.line())
    if out:
        tally.write(out)
    if tally.failures:
        sys.exit(f"{tally.failed_requests} requests failed, the first one with: {tally.failures[0]}")
