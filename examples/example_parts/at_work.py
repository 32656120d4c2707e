"""Simulated users: concurrent users put questions to an agent and send feedback, with counts on a terminal and in a
file.

A program that uses this module knows only the base URL of Headrace and sends its users' feedback. The program also
works with any other OpenAI-compatible server, without training.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, NotFoundError, OpenAIError

from example_parts.react import Episode

FAILURES_MAX = 10
UPDATE_S, WRITE_S = 0.5, 1.0


class Tally:
    """Counts of tasks and requests. Requests are model calls and feedback; a request counts as failed after all
    retries.
    """

    def __init__(self, seed: int, task_words: str, accepted_words: str) -> None:
        self._words = task_words, accepted_words
        self.feedback_sent = 0
        self.feedback_refused = False
        """Whether the server has no feedback page."""
        self.failed_requests = 0
        self.failures: list[str] = []
        """Messages of the first failures."""
        self._seed = seed
        self._calls = 0
        self._tasks: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._began = time.monotonic()

    def count(self, kind: str, episode: Episode, *, accepted: bool) -> None:
        self._calls += episode.calls
        self._tasks[kind] += 1
        self._accepted[kind] += accepted
        if episode.failure is not None:
            self._add_failure(episode.failure)

    def feedback_failed(self, error: Exception) -> None:
        self.feedback_sent += 1
        self._add_failure(f"feedback: {type(error).__name__}: {error}")

    def line(self) -> str:
        count, accepted = self._tasks.total(), self._accepted.total()
        rate = self._calls / max(1e-9, time.monotonic() - self._began)
        note = ", no feedback taken" if self.feedback_refused else ""
        tasks = f"{count} {self._words[0]}, {accepted / max(1, count):.0%} {self._words[1]}"
        return f"{tasks}, {self._calls} model calls ({rate:.0f}/s), {self.failed_requests} failed{note}"

    def write(self, path: Path) -> None:
        summary = {
            "tasks": self._tasks.total(),
            "accepted": self._accepted.total(),
            "accepted_by_kind": {kind: self._accepted[kind] / count for kind, count in sorted(self._tasks.items())},
            "calls": self._calls,
            "feedback": self.feedback_sent,
            "feedback_taken": not self.feedback_refused,
            "requests": self._calls + self.feedback_sent,
            "failed_requests": self.failed_requests,
            "failures": self.failures,
            "wall_s": round(time.monotonic() - self._began, 3),
            "seed": self._seed,
        }
        draft = path.with_name(f".{path.name}")
        draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)

    @contextlib.asynccontextmanager
    async def written(self, path: Path | None) -> AsyncIterator[None]:
        """Write the counts to `path` during the block, once a second and at its end."""
        if path is None:
            yield
            return

        async def write_regularly(path: Path) -> None:
            while True:
                self.write(path)
                await asyncio.sleep(WRITE_S)

        task = asyncio.create_task(write_regularly(path))
        try:
            yield
        finally:
            task.cancel()
            self.write(path)

    @contextlib.contextmanager
    def displayed(self, *, enabled: bool) -> Iterator[None]:
        """Display one line on the terminal that is updated regularly."""
        if not enabled:
            yield
            return
        over = threading.Event()

        def update() -> None:
            while not over.wait(UPDATE_S):
                sys.stderr.write(f"\r\x1b[K{self.line()}")
                sys.stderr.flush()

        thread = threading.Thread(target=update, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            sys.stderr.write("\r\x1b[K")

    def _add_failure(self, message: str) -> None:
        self.failed_requests += 1
        if len(self.failures) < FAILURES_MAX:
            self.failures.append(message)


class UserTask(Protocol):
    """Task of a user."""

    @property
    def kind(self) -> str:
        """Category under which the task is counted."""


async def send_feedback(client: AsyncOpenAI, **fields: Any) -> None:
    """Send feedback to the gateway. Raises `OpenAIError`."""
    await client.post("/feedback", body={"feedback_id": uuid.uuid4().hex, **fields}, cast_to=object)


async def end_session(client: AsyncOpenAI, task: UserTask, episode: Episode, **fields: Any) -> None:
    """Close the run, with feedback about the whole run. Raises `OpenAIError`."""
    named = {"msg_ids": episode.response_ids, "ends_session": True, "task_id": task.kind}
    await send_feedback(client, **named, **fields)


T = TypeVar("T", bound=UserTask)


class Users(ABC, Generic[T]):
    """Users with tasks: at most `options.concurrency` users at a time, and `options.tasks` tasks in total (0: no
    limit).
    """

    words = ("questions", "of the answers accepted")
    """Texts of the summary: the name of the counted tasks, and of the accepted share."""

    def __init__(self, tasks: Iterator[T], options: argparse.Namespace) -> None:
        self._tasks = tasks
        self._options = options
        self._started_tasks = 0
        self.tally = Tally(options.seed, *self.words)
        self.had_enough = False
        """Whether the users stop. Open tasks are still finished, but no new ones are started."""

    @abstractmethod
    async def play(self, task: T) -> Episode:
        """Let the agent answer. Errors of the model or the server are not raised."""

    @abstractmethod
    def accepts(self, task: T, episode: Episode) -> bool:
        """Return whether the users accept the answer."""

    @abstractmethod
    async def give_feedback(self, task: T, episode: Episode, *, accepted: bool) -> None:
        """Send feedback and end the session. Raises `OpenAIError`."""

    async def ask(self) -> None:
        """Run concurrent users until the tasks are exhausted or the users stop."""
        async with asyncio.TaskGroup() as users:
            for _ in range(self._options.concurrency):
                users.create_task(self._run_user())

    async def _run_user(self) -> None:
        for task in self.questions():
            await self.attend(task)

    def questions(self) -> Iterator[T]:
        """Yield the tasks in order, without end or up to the limit; any free user takes the next one."""
        while not self.had_enough and not 0 < self._options.tasks <= self._started_tasks:
            self._started_tasks += 1
            yield next(self._tasks)

    async def attend(self, task: T) -> None:
        """Handle one task, from the question to the feedback about the answer."""
        episode = await self.play(task)
        accepted = episode.answer is not None and self.accepts(task, episode)
        if episode.failure is None:
            await self.send(lambda: self.give_feedback(task, episode, accepted=accepted))
        self.tally.count(task.kind, episode, accepted=accepted)

    async def send(self, feedback: Callable[[], Awaitable[None]]) -> None:
        """Send feedback. A server without a feedback page is not Headrace and gets no further feedback."""
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
    """Run the users until the tasks or the time are exhausted, or the process receives a signal."""
    loop = asyncio.get_running_loop()
    direct = DefaultAsyncHttpxClient(trust_env=False)  # proxies of the environment do not apply to the gateway
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=options.base_url, api_key=key, http_client=direct) as client:
        users = users_of(client, options)

        def enough() -> None:
            users.had_enough = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, enough)
        if options.duration:
            loop.call_later(options.duration, enough)
        with users.tally.displayed(enabled=sys.stderr.isatty() and not options.quiet):
            async with users.tally.written(options.out):
                await users.ask()
        return users.tally


def parser(description: str, model: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all agents of the examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--model", default=model)
    parser.add_argument("--tasks", type=int, default=0, help="number of questions; 0: unlimited (%(default)s)")
    parser.add_argument("--duration", type=float, metavar="S", help="seconds to run (default: unlimited)")
    parser.add_argument("--concurrency", type=int, default=16, help="concurrent users (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions and their order (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="token limit of a model call; raise it for reasoning models"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a summary to this file, as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress line on the terminal")
    return parser


def report_and_exit(tally: Tally, out: Path | None) -> None:
    """Print the summary, and exit with a message if requests failed."""
    print(tally.line())
    if tally.failures:
        sys.exit(f"{tally.failed_requests} requests failed, the first one with: {tally.failures[0]}")
