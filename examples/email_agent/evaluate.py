"""Plays held-out tasks: for the registry's gate, or against one version, a line of JSON for each.

    python -m email_agent.evaluate --base-url http://127.0.0.1:8000/v1 --gate
    python -m email_agent.evaluate --base-url http://127.0.0.1:8000/v1 --model email-agent@0123456789abcdef

The questions are about folders and people that the agent's own traffic never asks about: `--seed` chooses the mailbox
and them. With `--gate` the program names its tasks, those that decide and those of the audit that decide nothing, and
then plays what each line of its standard input asks for (docs/gate.md). With `--model` it plays audit tasks. A task
that the server could not play has no score, and then the exit status is 1: half an evaluation is none.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import uuid
from typing import Any

from openai import AsyncOpenAI

from email_agent import mailbox
from email_agent.react import Episode, play
from email_agent.rewards import same_answer
from email_agent.tasks import Split, Task, stream
from email_agent.tools import Mailtools


async def evaluate(client: AsyncOpenAI, options: argparse.Namespace) -> list[str]:
    """Print a line per audit task that was played; returns why the others could not be."""
    box = mailbox.generate(options.seed)
    tools = Mailtools(box.open())
    asked = enumerate(_chosen(box, "audit", options), options.plays_seed)
    failures: list[str] = []

    async def examine() -> None:
        for seed, task in asked:
            episode = await play(_session(client), options.model, tools, task.question, options.max_tokens, seed)
            if episode.failure is None:
                print(json.dumps(_result(task, episode)), flush=True)
            else:
                failures.append(f"{task.id}: {episode.failure}")

    async with asyncio.TaskGroup() as examiners:
        for _ in range(options.concurrency):
            examiners.create_task(examine())
    return failures


async def serve(client: AsyncOpenAI, options: argparse.Namespace) -> list[str]:
    """Name the tasks, then play what is asked for until standard input ends, or until something could not be played."""
    box = mailbox.generate(options.seed)
    tools = Mailtools(box.open())
    splits: dict[Split, list[Task]] = {"gate": _chosen(box, "gate", options), "audit": _chosen(box, "audit", options)}
    known = {task.id: task for chosen in splits.values() for task in chosen}
    print(json.dumps({split: [task.id for task in chosen] for split, chosen in splits.items()}), flush=True)

    async def answer(asked: dict[str, Any]) -> None:
        task = known[asked["task"]]
        version, seed = asked["version"], asked["seed"]
        episode = await play(_session(client), version, tools, task.question, options.max_tokens, seed)
        if episode.failure is not None:
            raise Unplayable(f"{task.id}: {episode.failure}")
        print(json.dumps(asked | _result(task, episode)), flush=True)

    lines = await _standard_input()
    failures: list[str] = []
    try:
        async with asyncio.TaskGroup() as plays:
            while line := await lines.readline():
                plays.create_task(answer(json.loads(line)))
    except* Unplayable as group:
        failures += map(str, group.exceptions)
    return failures


class Unplayable(Exception):
    """The server could not be asked."""


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _chosen(box: mailbox.Mailbox, split: Split, options: argparse.Namespace) -> list[Task]:
    return list(itertools.islice(stream(box, split, options.seed), options.tasks))


def _session(client: AsyncOpenAI) -> AsyncOpenAI:
    """Never trained on, and not taken for the same question of an earlier evaluation going on."""
    headers = {"X-Headrace-Purpose": "eval", "X-Session-Id": f"evaluation-{uuid.uuid4().hex}"}
    return client.with_options(default_headers=headers)


def _result(task: Task, episode: Episode) -> dict[str, object]:
    score = int(episode.answer is not None and same_answer(episode.answer, task.expected))
    return {"task": task.id, "score": score, "kind": task.kind, "answer": episode.answer, "calls": episode.calls}


async def run(options: argparse.Namespace) -> list[str]:
    async with AsyncOpenAI(base_url=options.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        return await (serve if options.gate else evaluate)(client, options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play held-out tasks against versions of the e-mail agent's model.")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gate", action="store_true", help="play what the lines of standard input ask for")
    what.add_argument("--model", help="name@digest, or any model's name elsewhere")
    many = "how many questions of a split, all kinds alike (%(default)s)"
    parser.add_argument("--tasks", type=int, default=96, help=many)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="which mailbox and which questions (%(default)s)")
    parser.add_argument("--plays-seed", type=int, default=0, help="with --model: where the seeds of the plays begin")
    parser.add_argument("--max-tokens", type=int, default=64)
    failures = asyncio.run(run(parser.parse_args()))
    if failures:
        sys.exit(f"{len(failures)} tasks could not be played, the first one being {failures[0]}")


if __name__ == "__main__":
    main()
