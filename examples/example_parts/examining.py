"""Plays held-out tasks: for the registry's gate, or against one version, a line of JSON for each.

With `--gate` a program names its tasks, those that decide and those of the audit that decide nothing, and then plays
what each line of its standard input asks for (docs/gate.md). With `--model` it plays audit tasks. A task that the
server could not play has no score, and then the exit status is 1: half an evaluation is none.
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
from example_parts.standard_input import standard_input

Half = Literal["gate", "audit"]


class Named(Protocol):
    """A held-out task."""

    @property
    def id(self) -> str:
        """The same for the same task, whoever asks."""


T = TypeVar("T", bound=Named)


class Unplayable(Exception):
    """The server could not be asked."""


class Examination(ABC, Generic[T]):
    """What is asked of a version, and what is said of its answers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Options of the example's own, beside the common ones."""

    @abstractmethod
    def tasks(self, half: Half) -> Sequence[T]:
        """`options.tasks` tasks of one half, the same for the same seed."""

    @abstractmethod
    async def play(self, client: AsyncOpenAI, version: str, task: T, seed: int) -> Episode:
        """One play; with the same seed as far as possible the same."""

    @abstractmethod
    def result(self, task: T, episode: Episode) -> dict[str, object]:
        """What is printed of it: `task`, a `score` from 0 to 1, and what else there is to say."""

    async def measure(self, client: AsyncOpenAI) -> list[str]:
        """Print a line per audit task that was played; returns why the others could not be."""
        asked = enumerate(self.tasks("audit"), self.options.plays_seed)
        failures: list[str] = []

        async def examine() -> None:
            for seed, task in asked:
                try:
                    print(json.dumps(await self._played(client, self.options.model, task, seed)), flush=True)
                except Unplayable as failure:
                    failures.append(str(failure))

        async with asyncio.TaskGroup() as examiners:
            for _ in range(self.options.concurrency):
                examiners.create_task(examine())
        return failures

    async def serve(self, client: AsyncOpenAI) -> list[str]:
        """Name the tasks, then play what is asked for until standard input ends, or until something could not be."""
        halves: dict[Half, Sequence[T]] = {"gate": self.tasks("gate"), "audit": self.tasks("audit")}
        known = {task.id: task for chosen in halves.values() for task in chosen}
        print(json.dumps({half: [task.id for task in chosen] for half, chosen in halves.items()}), flush=True)

        async def answer(asked: dict[str, Any]) -> None:
            told = await self._played(client, asked["version"], known[asked["task"]], asked["seed"])
            print(json.dumps(asked | told), flush=True)

        lines = await standard_input()
        failures: list[str] = []
        try:
            async with asyncio.TaskGroup() as plays:
                while line := await lines.readline():
                    plays.create_task(answer(json.loads(line)))
        except* Unplayable as group:
            failures += map(str, group.exceptions)
        return failures

    async def _played(self, client: AsyncOpenAI, version: str, task: T, seed: int) -> dict[str, object]:
        """Raises `Unplayable`."""
        episode = await self.play(_session(client), version, task, seed)
        if episode.failure is not None:
            raise Unplayable(f"{task.id}: {episode.failure}")
        return self.result(task, episode)


def main(examination: type[Examination[Any]], description: str) -> None:
    """The program of an example; exits with a message when a task could not be played."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gate", action="store_true", help="play what the lines of standard input ask for")
    what.add_argument("--model", help="name@digest, or any model's name elsewhere")
    many = "how many questions of a half, all kinds alike (%(default)s)"
    parser.add_argument("--tasks", type=int, default=96, help=many)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="which questions (%(default)s)")
    parser.add_argument("--plays-seed", type=int, default=0, help="with --model: where the seeds of the plays begin")
    parser.add_argument("--max-tokens", type=int, default=64)
    examination.add_options(parser)
    failures = asyncio.run(_run(examination(parser.parse_args())))
    if failures:
        sys.exit(f"{len(failures)} tasks could not be played, the first one being {failures[0]}")


async def _run(examination: Examination[Any]) -> list[str]:
    options = examination.options
    direct = DefaultAsyncHttpxClient(trust_env=False)  # the gateway is not behind a proxy of the environment
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=options.base_url, api_key=key, http_client=direct) as client:
        return await (examination.serve if options.gate else examination.measure)(client)


def _session(client: AsyncOpenAI) -> AsyncOpenAI:
    """Never trained on, and not taken for the same question of an earlier evaluation going on."""
    headers = {"X-Headrace-Purpose": "eval", "X-Session-Id": f"evaluation-{uuid.uuid4().hex}"}
    return client.with_options(default_headers=headers)
