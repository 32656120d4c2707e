"""Run the agent on a mailbox: simulated users put questions, and send rewards, rare thumbs, edits or corrections.

    python -m email_agent.agent --base-url http://127.0.0.1:8000/v1 --model email-agent --tasks 100

The program uses the `openai` package. It knows only the base URL of Headrace and sends its users' feedback. It also
works with any other OpenAI-compatible server, without training.

Each kind of feedback is a function in `SIGNALS`, which the agent's option `--signal` selects. All of them end the
session, which closes the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from email_agent import mailbox
from email_agent.demonstrations import demonstrate
from email_agent.mailbox import Mailtools, Task, go_on, play, stream
from email_agent.rewards import same_answer
from example_parts import at_work
from example_parts.react import Episode

THUMBS_SHARE, THUMBS_FLIPPED, THUMBS_USERS = 0.1, 0.2, 40
POISONERS = 3
THANKS, WRONG = "Thank you, that is right.", "No, that is wrong."
_REPLY_TOKENS_MAX = 16


@dataclass(frozen=True)
class AnsweredQuestion:
    """An answered question, with the data that a user needs for feedback about it."""

    client: AsyncOpenAI
    model: str
    tools: Mailtools
    task: Task
    episode: Episode
    accepted: bool
    draw: random.Random

    async def send(self, **fields: Any) -> None:
        await at_work.send_feedback(self.client, **fields)

    async def end(self, **fields: Any) -> None:
        """Close the run, with feedback about the whole run."""
        await at_work.end_session(self.client, self.task, self.episode, **fields)


async def rewards(answered: AnsweredQuestion) -> None:
    """Send whether the answer was accepted, with the right answer as context."""
    await answered.end(value=float(answered.accepted), context={"expected": answered.task.expected})


async def thumbs(answered: AnsweredQuestion, share: float = THUMBS_SHARE, poisoners: float = 0.0) -> None:
    """Send a thumb for one question in ten; one thumb in five is wrong.

    Args:
        share: share of the users that give a thumb.
        poisoners: share of those that always give the wrong thumb; they are few people.
    """
    if answered.draw.random() >= share:
        return await answered.end()
    poisons = answered.draw.random() < poisoners
    wrong = poisons or answered.draw.random() < THUMBS_FLIPPED
    rater = (
        f"poisoner {answered.draw.randrange(POISONERS)}" if poisons else f"user {answered.draw.randrange(THUMBS_USERS)}"
    )
    return await answered.end(value=float(answered.accepted is not wrong), rater=rater)


async def edits(answered: AnsweredQuestion) -> None:
    """Send an edit with the first right step that the agent missed, as an informed user. A right run gets no edit."""
    correction = _correction(answered.episode, demonstrate(answered.task, answered.tools, answered.draw, lapses=0.0))
    if correction is not None:
        response_id, message = correction
        await answered.send(msg_ids=[response_id], level="response", edit=message)
    await answered.end()


async def corrections(answered: AnsweredQuestion) -> None:
    """Type a correction or thanks as the next message, without other feedback."""
    await reply(answered, THANKS if answered.accepted else f"{WRONG} It is {answered.task.expected}.")
    await answered.end()


async def reply(answered: AnsweredQuestion, text: str, tokens_max: int = _REPLY_TOKENS_MAX) -> None:
    """Send the user's next message, if there was an answer, and let the agent continue."""
    episode = answered.episode
    if episode.answer is None:
        return
    episode.messages += [{"role": "assistant", "content": episode.answer}, {"role": "user", "content": text}]
    await go_on(answered.client, answered.model, answered.tools, episode, tokens_max)


SIGNALS: Mapping[str, Callable[[AnsweredQuestion], Awaitable[None]]] = {
    "rewards": rewards,
    "thumbs": thumbs,
    "edits": edits,
    "corrections": corrections,
}


def _correction(episode: Episode, right: list[Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the first response that differs from the right step, and that step, or None."""
    responses = [message for message in episode.messages if message["role"] == "assistant"]
    if episode.answer is not None:
        responses.append({"role": "assistant", "content": episode.answer})
    steps = [message for message in right if message["role"] == "assistant"]
    for response_id, response, step in zip(episode.response_ids, responses, steps, strict=False):
        if not _is_equal_step(response, step):
            return response_id, step
    return None


def _is_equal_step(response: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    calls, expected_calls = response.get("tool_calls") or [], step.get("tool_calls") or []
    if calls or expected_calls:
        return [_tool_and_arguments(call) for call in calls] == [_tool_and_arguments(call) for call in expected_calls]
    return same_answer(response.get("content") or "", step["content"])


def _tool_and_arguments(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    try:
        return function["name"], json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["name"], function["arguments"]


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
