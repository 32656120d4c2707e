"""The agent itself: a ReAct loop with native tool calls. Nothing here knows who serves the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError, omit

from email_agent.tools import DEFINITIONS, Mailtools

SYSTEM = "Answer questions about a mailbox. Use the tools, then give the bare answer."
TURNS_MAX = 5
TEMPERATURE = 1.0
"""An agent that is to learn must try things; evaluation samples alike, so that it measures what users meet."""


@dataclass
class Episode:
    """One question, played to its end."""

    answer: str | None = None
    """What the user gets to read; None when the agent never came to an answer."""
    response_ids: list[str] = field(default_factory=list)
    """Of every model call, in order."""
    failure: str | None = None
    """Why the server could not be asked, after the client's own retries."""
    messages: list[Any] = field(default_factory=list)
    """What was said so far; the answer that the user reads is not among it."""

    @property
    def calls(self) -> int:
        return len(self.response_ids) + (self.failure is not None)


async def play(
    client: AsyncOpenAI, model: str, tools: Mailtools, question: str, max_tokens: int, seed: int | None = None
) -> Episode:
    """Answer `question` within `TURNS_MAX` model calls. Never raises for what the model or the server does.

    With a `seed` the server draws the same tokens for the same messages, as far as it can, and other ones in each turn:
    with one seed for all, turns that begin alike would go on alike.
    """
    episode = Episode(messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
    await go_on(client, model, tools, episode, max_tokens, seed)
    return episode


async def go_on(
    client: AsyncOpenAI, model: str, tools: Mailtools, episode: Episode, max_tokens: int, seed: int | None = None
) -> None:
    """Ask the model about what was said so far, until it answers; as `play`."""
    messages = episode.messages
    for turn in range(TURNS_MAX):
        try:
            response = await client.chat.completions.create(
                model=model,
                messages=messages,
                tools=DEFINITIONS,
                temperature=TEMPERATURE,
                max_tokens=max_tokens,
                seed=omit if seed is None else seed * TURNS_MAX + turn,
            )
        except OpenAIError as error:
            episode.failure = f"{type(error).__name__}: {error}"
            return
        episode.response_ids.append(response.id)
        message = response.choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        if not calls:
            episode.answer = message.content or ""
            return
        messages.append(
            {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump() for call in calls]}
        )
        for call in calls:
            content = tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
