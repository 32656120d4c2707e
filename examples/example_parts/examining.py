"""Frame of the programs that play held-out tasks for the registry's gate, or against one version.

With `--gate` a program prints its task names, those of the gate and those of the audit, and then plays the requests on
standard input (docs/gate.md). With `--model` it plays audit tasks. Each result is a line of JSON. A task that the
server could not play has no score, and the exit status is then 1, because a partial evaluation is no result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from example_parts.react import Episode


async def standard_input() -> asyncio.StreamReader:
    """Return a reader of standard input. The caller must be its only reader."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


Half = Literal["gate", "audit"]


class HeldOutTask(Protocol):
    """A held-out task."""

    @property
    def id(self) -> str:
        """Identifier of the task, equal in every run."""


T = TypeVar("T", bound=HeldOutTask)


class Unplayable(Exception):
    """Error when the server could not play a task."""


class Examination(ABC, Generic[T]):
    """Held-out tasks, and the results of plays."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add options of the example."""

    @abstractmethod
    def tasks(self, half: Half) -> Sequence[T]:
        """Return `options.tasks` tasks of one half, the same for the same seed."""

    @abstractmethod
    async def play(self, client: AsyncOpenAI, version: str, task: T, seed: int) -> Episode:
        """Play a task once. With the same seed the play is as similar as possible."""

    @abstractmethod
    def result(self, task: T, episode: Episode) -> dict[str, object]:
        """Return the printed result: `task`, a `score` from 0 to 1, and further fields."""

    async def measure(self, client: AsyncOpenAI) -> list[str]:
        """Print a line per played audit task. Return why the other tasks could not be played."""
        numbered_tasks = enumerate(self.tasks("audit"), self.options.plays_seed)
        failures: list[str] = []

        async def examine() -> None:
            for seed, task in numbered_tasks:
                try:
                    print(json.dumps(await self._play_and_score(client, self.options.model, task, seed)), flush=True)
                except Unplayable as failure:
                    failures.append(str(failure))

        async with asyncio.TaskGroup() as examiners:
            for _ in range(self.options.concurrency):
                examiners.create_task(examine())
        return failures

    async def serve(self, client: AsyncOpenAI) -> list[str]:
        """Print the task names, then play requests until standard input ends or a task could not be played."""
        halves: dict[Half, Sequence[T]] = {"gate": self.tasks("gate"), "audit": self.tasks("audit")}
        tasks_by_id = {task.id: task for half_tasks in halves.values() for task in half_tasks}
        print(json.dumps({half: [task.id for task in half_tasks] for half, half_tasks in halves.items()}), flush=True)

        async def answer(request: dict[str, Any]) -> None:
            task = tasks_by_id[request["task"]]
            result = await self._play_and_score(client, request["version"], task, request["seed"])
            print(json.dumps(request | result), flush=True)

        lines = await standard_input()
        failures: list[str] = []
        try:
            async with asyncio.TaskGroup() as plays:
                while line := await lines.readline():
                    plays.create_task(answer(json.loads(line)))
        except* Unplayable as group:
            failures += map(str, group.exceptions)
        return failures

    async def _play_and_score(self, client: AsyncOpenAI, version: str, task: T, seed: int) -> dict[str, object]:
        """Play a task and return its result. Raises `Unplayable`."""
        episode = await self.play(_session(client), version, task, seed)
        if episode.failure is not None:
            raise Unplayable(f"{task.id}: {episode.failure}")
        return self.result(task, episode)


def main(examination: type[Examination[Any]], description: str) -> None:
    """Run the program of an example, and exit with a message if a task could not be played."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--gate", action="store_true", help="play the requests on standard input")
    mode.add_argument("--model", help="name@digest, or the name of a model at another server")
    help_text = "number of questions of a half, balanced by kind (%(default)s)"
    parser.add_argument("--tasks", type=int, default=96, help=help_text)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions (%(default)s)")
    parser.add_argument("--plays-seed", type=int, default=0, help="with --model: first seed of the plays")
    parser.add_argument("--max-tokens", type=int, default=64)
    examination.add_options(parser)
    failures = asyncio.run(_run(examination(parser.parse_args())))
    if failures:
        sys.exit(f"{len(failures)} tasks could not be played, the first one being {failures[0]}")


async def _run(examination: Examination[Any]) -> list[str]:
    options = examination.options
    direct = DefaultAsyncHttpxClient(trust_env=False)  # proxies of the environment do not apply to the gateway
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=options.base_url, api_key=key, http_client=direct) as client:
        return await (examination.serve if options.gate else examination.measure)(client)


def _session(client: AsyncOpenAI) -> AsyncOpenAI:
    """Return a client whose calls are excluded from training and belong to a new session."""
    headers = {"X-Headrace-Purpose": "eval", "X-Session-Id": f"evaluation-{uuid.uuid4().hex}"}
    return client.with_options(default_headers=headers)
