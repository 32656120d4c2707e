"""Plays held-out tasks against one version, and prints a line of JSON for each.

    python -m email_agent.evaluate --base-url http://127.0.0.1:8000/v1 --model email-agent@0123456789abcdef

The questions are about folders and people that the agent's own traffic never asks about, and they are the same ones for
every version: `--seed` chooses the mailbox and them. The registry's gate reads the output. A task that the server could
not play has no score, and then the exit status is 1: half an evaluation is none.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import uuid

from openai import AsyncOpenAI

from email_agent import mailbox
from email_agent.react import Episode, play
from email_agent.rewards import same_answer
from email_agent.tasks import Task, stream
from email_agent.tools import Mailtools


async def evaluate(client: AsyncOpenAI, options: argparse.Namespace) -> list[str]:
    """Print a line per task that was played; returns why the others could not be."""
    box = mailbox.generate(options.seed)
    tools = Mailtools(box.open())
    asked = itertools.islice(stream(box, "held_out", options.seed), options.tasks)
    failures: list[str] = []

    async def examine() -> None:
        for task in asked:
            episode = await play(_session(client), options.model, tools, task.question, options.max_tokens)
            if episode.failure is None:
                print(json.dumps(_result(task, episode)), flush=True)
            else:
                failures.append(f"{task.id}: {episode.failure}")

    async with asyncio.TaskGroup() as examiners:
        for _ in range(options.concurrency):
            examiners.create_task(examine())
    return failures


def _session(client: AsyncOpenAI) -> AsyncOpenAI:
    """Never trained on, and not taken for the same question of an earlier evaluation going on."""
    headers = {"X-Headrace-Purpose": "eval", "X-Session-Id": f"evaluation-{uuid.uuid4().hex}"}
    return client.with_options(default_headers=headers)


def _result(task: Task, episode: Episode) -> dict[str, object]:
    score = int(episode.answer is not None and same_answer(episode.answer, task.expected))
    return {"task": task.id, "score": score, "kind": task.kind, "answer": episode.answer, "calls": episode.calls}


async def run(options: argparse.Namespace) -> list[str]:
    async with AsyncOpenAI(base_url=options.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        return await evaluate(client, options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play held-out tasks against one version of the e-mail agent's model.")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--model", required=True, help="name@digest, or any model's name elsewhere")
    parser.add_argument("--tasks", type=int, default=96, help="how many questions, all kinds alike (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="which mailbox and which questions (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    failures = asyncio.run(run(parser.parse_args()))
    if failures:
        sys.exit(f"{len(failures)} tasks could not be played, the first one being {failures[0]}")


if __name__ == "__main__":
    main()
