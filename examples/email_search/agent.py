"""Run the agent in rounds: users search for mails, each query is run several times, and the runs are compared.

    python -m email_search.agent --base-url http://127.0.0.1:8000/v1 --model email-search --until 1

The program uses the `openai` package, and also works with any other OpenAI-compatible server, without training. A round
ends when enough pairs for a version were compared and that version serves.
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
from email_search.queries import AGENT, RELEVANT, Query, Searchtools, stream
from email_search.rewards import best_and_worst, parts, recall, score_calls
from example_parts import at_work
from example_parts.react import Episode

RUNS = 4
"""Runs of each query."""
PAIRS = 16
"""Compared pairs of a round: `trainer.batch_experiences` in headrace.toml times `trainer.steps_per_version`, in
pairs."""
QUERIES_MAX = 400
"""Maximum number of queries in a round, even if few of them had runs that differ."""
VERSION_S_MAX = 120.0
_POLL_S = 0.3


class Users(at_work.Users[Query]):
    """Users that search for mails in the mailbox of one seed, and compare several runs of each query."""

    def __init__(self, client: AsyncOpenAI, options: argparse.Namespace) -> None:
        box = mailbox.generate(options.seed)
        super().__init__(stream(box, "train", options.seed * 1000 + options.begun), options)
        self._client = client
        self._tools = Searchtools(box.open())
        self._queries_left = 0
        self._pairs_left = 0

    async def ask(self) -> None:
        """Run the rounds until the last round or until the users stop."""
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
        """Play one run in a session of its own, which is the only difference between runs of one query."""
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
            await self.send(partial(self._prefer, *both))
        for run in answered:
            await self.send(partial(self.give_feedback, task, run, accepted=self.accepts(task, run)))
        for run in runs:
            self.tally.count(task.kind, run, accepted=self.accepts(task, run))

    async def give_feedback(self, task: Query, episode: Episode, *, accepted: bool) -> None:
        """Send the reward of the run by parts. Training uses only the comparisons."""
        await at_work.end_session(self._client, task, episode, parts=self._parts(task, episode))

    async def _prefer(self, best: Episode, worst: Episode) -> None:
        better, worse = best.response_ids[0], worst.response_ids[0]
        await at_work.send_feedback(self._client, preference={"chosen": better, "rejected": worse})

    def _parts(self, task: Query, episode: Episode) -> dict[str, float]:
        return parts(score_calls(task, [*episode.messages, *_answer_message(episode)]))

    async def _version(self) -> str | None:
        """Return the version that the model's name means now, or None if the server does not report one."""
        try:
            model = await self._client.models.retrieve(self._options.model)
        except OpenAIError:
            return None
        version = (model.model_extra or {}).get("version")
        return version if isinstance(version, str) else None

    async def _version_after(self, before: str | None) -> None:
        """Wait until another version serves, at most `VERSION_S_MAX` if the round has made none."""
        deadline = time.monotonic() + VERSION_S_MAX
        while before is not None and not self.had_enough and time.monotonic() < deadline:
            if await self._version() not in (None, before):
                return
            await asyncio.sleep(_POLL_S)


def _answer_message(episode: Episode) -> list[dict[str, Any]]:
    """Return the message that the agent sent in place of a call."""
    return [] if episode.answer is None else [{"role": "assistant", "content": episode.answer}]


def main() -> None:
    parser = at_work.parser("Let simulated users search for mails and compare the results.", "email-search")
    parser.add_argument("--begun", type=int, default=0, metavar="N", help="number of earlier rounds (%(default)s)")
    parser.add_argument("--until", type=int, default=10, metavar="N", help="number of the last round (%(default)s)")
    options = parser.parse_args()
    at_work.report_and_exit(asyncio.run(at_work.run(Users, options)), options.out)


if __name__ == "__main__":
    main()
