"""What simulated users say of an answer: a reward, a rare thumb, an edit, or their next message.

Each is a function of `SIGNALS`, `--signal` of the agent by name. All end the session, so that the run is closed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from email_agent.demonstrations import demonstrate
from email_agent.react import Episode, go_on
from email_agent.rewards import same_answer
from email_agent.tasks import Task
from email_agent.tools import Mailtools
from example_parts import at_work

THUMBS_SHARE, THUMBS_FLIPPED, THUMBS_USERS = 0.1, 0.2, 40
_REPLY_TOKENS_MAX = 16


@dataclass(frozen=True)
class Played:
    """One question that was answered, with what a user needs to say something about it."""

    client: AsyncOpenAI
    model: str
    tools: Mailtools
    task: Task
    episode: Episode
    accepted: bool
    draw: random.Random

    async def send(self, **said: Any) -> None:
        await at_work.send_feedback(self.client, **said)

    async def end(self, **said: Any) -> None:
        """Close the run; `said` is about all of it."""
        await at_work.end_session(self.client, self.task, self.episode, **said)


async def rewards(played: Played) -> None:
    """Whether the answer was accepted, and what would have been right."""
    await played.end(value=float(played.accepted), context={"expected": played.task.expected})


async def thumbs(played: Played) -> None:
    """One user in ten says whether the answer was accepted, and one in five of those the contrary."""
    if played.draw.random() >= THUMBS_SHARE:
        return await played.end()
    up = played.accepted is not (played.draw.random() < THUMBS_FLIPPED)
    return await played.end(value=float(up), rater=f"user {played.draw.randrange(THUMBS_USERS)}")


async def edits(played: Played) -> None:
    """Who knows the way shows what the first wrong step should have been. Says nothing of what was right."""
    shown = _correction(played.episode, demonstrate(played.task, played.tools, played.draw, lapses=0.0))
    if shown is not None:
        response_id, message = shown
        await played.send(msg_ids=[response_id], level="response", edit=message)
    await played.end()


async def corrections(played: Played) -> None:
    """The next message says what was wrong, or thanks. Nothing else is said."""
    episode = played.episode
    if episode.answer is not None:
        text = "Thank you, that is right." if played.accepted else f"No, that is wrong. It is {played.task.expected}."
        episode.messages += [{"role": "assistant", "content": episode.answer}, {"role": "user", "content": text}]
        await go_on(played.client, played.model, played.tools, episode, _REPLY_TOKENS_MAX)
    await played.end()


SIGNALS: Mapping[str, Callable[[Played], Awaitable[None]]] = {
    "rewards": rewards,
    "thumbs": thumbs,
    "edits": edits,
    "corrections": corrections,
}


def _correction(episode: Episode, right: list[Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The first response that is not the right step, and that step; None when there is none."""
    said = [one for one in episode.messages if one["role"] == "assistant"]
    if episode.answer is not None:
        said.append({"role": "assistant", "content": episode.answer})
    wanted = [one for one in right if one["role"] == "assistant"]
    for response_id, one, step in zip(episode.response_ids, said, wanted, strict=False):
        if not _equal(one, step):
            return response_id, step
    return None


def _equal(one: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    calls, wanted = one.get("tool_calls") or [], step.get("tool_calls") or []
    if calls or wanted:
        return [_called(call) for call in calls] == [_called(call) for call in wanted]
    return same_answer(one.get("content") or "", step["content"])


def _called(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    try:
        return function["name"], json.loads(function["arguments"])
    except ValueError:
        return function["name"], function["arguments"]
