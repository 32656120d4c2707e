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
POISONERS = 3
THANKS, WRONG = "Thank you, that is right.", "No, that is wrong."
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


async def thumbs(played: Played, share: float = THUMBS_SHARE, poisoners: float = 0.0) -> None:
    """One user in ten says whether the answer was accepted, and one in five of those the contrary.

    `share`: how many speak. Of those, `poisoners` always say the contrary; they are few people.
    """
    if played.draw.random() >= share:
        return await played.end()
    poisons = played.draw.random() < poisoners
    wrong = poisons or played.draw.random() < THUMBS_FLIPPED
    rater = f"poisoner {played.draw.randrange(POISONERS)}" if poisons else f"user {played.draw.randrange(THUMBS_USERS)}"
    return await played.end(value=float(played.accepted is not wrong), rater=rater)


async def edits(played: Played) -> None:
    """Who knows the way shows what the first wrong step should have been. Says nothing of what was right."""
    shown = _correction(played.episode, demonstrate(played.task, played.tools, played.draw, lapses=0.0))
    if shown is not None:
        response_id, message = shown
        await played.send(msg_ids=[response_id], level="response", edit=message)
    await played.end()


async def corrections(played: Played) -> None:
    """The next message says what was wrong, or thanks. Nothing else is said."""
    await reply(played, THANKS if played.accepted else f"{WRONG} It is {played.task.expected}.")
    await played.end()


async def reply(played: Played, text: str, tokens_max: int = _REPLY_TOKENS_MAX) -> None:
    """The user's next message, if there was an answer, and what the agent makes of it."""
    episode = played.episode
    if episode.answer is None:
        return
    episode.messages += [{"role": "assistant", "content": episode.answer}, {"role": "user", "content": text}]
    await go_on(played.client, played.model, played.tools, episode, tokens_max)


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
    except (ValueError, RecursionError):
        return function["name"], function["arguments"]
