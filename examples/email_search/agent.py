"""Puts the agent to work, in rounds: users look for mails, each query is run several times, the runs are compared.

    python -m email_search.agent --base-url http://127.0.0.1:8000/v1 --model email-search --until 1

An ordinary program on the `openai` package; with any other OpenAI-compatible server it works just as well, and learns
nothing. A round ends when so many pairs of runs were compared as make a version, and that version answers.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from email_agent import mailbox
from email_search.queries import RELEVANT, Query, stream
from email_search.react import AGENT
from email_search.rewards import best_and_worst, parts, recall, scored
from email_search.tools import Searchtools
from example_parts import at_work
from example_parts.react import Episode

RUNS = 4
"""Of each query."""
PAIRS = 16
"""In a round: `trainer.batch_experiences` of headrace.toml times `trainer.steps_per_version`, in pairs."""
QUERIES_MAX = 400
"""In a round, however few of them had runs that differ."""
VERSION_S_MAX = 120.0
_POLL_S = 0.3


class Users(at_work.Users[Query]):
    """Everybody who looks for mails in the mailbox of one seed, and says which of several runs was better."""

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        box = mailbox.generate(options.seed)
        super().__init__(stream(box, "train", options.seed * 1000 + options.begun), options)
        self._client = client
        self._tools = Searchtools(box.open())
        self._queries_left = 0
        self._pairs_left = 0

    async def ask(self) -> None:
        """Round after round, until there were enough or the users have had enough."""
        for _ in range(self._options.begun, self._options.until):
            if self.had_enough:
                break
            before = await self._version()
            self._queries_left, self._pairs_left = QUERIES_MAX, PAIRS
            await super().ask()
            await self._version_after(before)

    def questions(self) -> Iterator[Query]:
        for query in super().questions():
            yield query
            self._queries_left -= 1
            if self._pairs_left <= 0 or self._queries_left <= 0:
                return

    async def play(self, task: Query) -> Episode:
        """In a session of its own: runs of one query are told apart by nothing else."""
        options = self._options
        client = self._client.with_options(default_headers={"X-Session-Id": f"run-{uuid.uuid4().hex}"})
        return await AGENT.play(client, options.model, self._tools, task.question, options.max_tokens)

    def accepts(self, task: Query, episode: Episode) -> bool:
        return recall(task, episode.messages) == RELEVANT

    async def attend(self, task: Query) -> None:
        runs = await asyncio.gather(*(self.play(task) for _ in range(RUNS)))
        answered = [run for run in runs if run.failure is None]
        rewarded = [(sum(self._parts(task, run).values()), run) for run in answered]
        if self._pairs_left > 0 and rewarded and (both := best_and_worst(rewarded)):
            self._pairs_left -= 1
            await self.give(partial(self._prefer, *both))
        for run in answered:
            await self.give(partial(self.say, task, run, accepted=self.accepts(task, run)))
        for run in runs:
            self.tally.count(task.kind, run, accepted=self.accepts(task, run))

    async def say(self, task: Query, episode: Episode, *, accepted: bool) -> None:
        """What the run earned, part by part. It is the comparisons that are trained."""
        await at_work.end_session(self._client, task, episode, parts=self._parts(task, episode))

    async def _prefer(self, best: Episode, worst: Episode) -> None:
        better, worse = best.response_ids[0], worst.response_ids[0]
        await at_work.send_feedback(self._client, preference={"chosen": better, "rejected": worse})

    def _parts(self, task: Query, episode: Episode) -> dict[str, float]:
        return parts(scored(task, [*episode.messages, *_words(episode)]))

    async def _version(self) -> str | None:
        """What the model's name means now; None where the server does not say, or has no versions."""
        try:
            found = await self._client.models.retrieve(self._options.model)
        except OpenAIError:
            return None
        version = (found.model_extra or {}).get("version")
        return version if isinstance(version, str) else None

    async def _version_after(self, before: str | None) -> None:
        """Returns when another version answers; at the latest after `VERSION_S_MAX`, when the round has made none."""
        deadline = time.monotonic() + VERSION_S_MAX
        while before is not None and not self.had_enough and time.monotonic() < deadline:
            if await self._version() not in (None, before):
                return
            await asyncio.sleep(_POLL_S)


def _words(episode: Episode) -> list[dict[str, Any]]:
    """What was answered in place of a call."""
    return [] if episode.answer is None else [{"role": "assistant", "content": episode.answer}]


def main() -> None:
    parser = at_work.parser("Let simulated users look for mails, and compare what they get.", "email-search")
    parser.add_argument("--begun", type=int, default=0, metavar="N", help="rounds that there were before (%(default)s)")
    parser.add_argument("--until", type=int, default=10, metavar="N", help="the last round (%(default)s)")
    options = parser.parse_args()
    at_work.ended(asyncio.run(at_work.run(Users, options)), options.out)


if __name__ == "__main__":
    main()
