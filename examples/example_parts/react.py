"""A ReAct loop with native tool calls. Nothing here knows who serves the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openai import AsyncOpenAI, OpenAIError, omit

TEMPERATURE = 1.0
"""An agent that is to learn must try things; evaluation samples alike, so that it measures what users meet."""


class Tools(Protocol):
    """What an agent may call."""

    def call(self, name: str, arguments: str) -> str:
        """Run a call as a model wrote it. Quick; anything wrong with it becomes an answer for the model."""


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


@dataclass(frozen=True)
class Agent:
    """What it is told, what it may call, and how often it may ask the model for one answer."""

    system: str
    definitions: Sequence[Any]
    turns_max: int

    async def play(
        self,
        client: AsyncOpenAI,
        model: str,
        tools: Tools,
        question: str,
        max_tokens: int,
        seed: int | None = None,
    ) -> Episode:
        """Answer `question` within `turns_max` model calls. Never raises for what the model or the server does.

        With a `seed` the server draws the same tokens for the same messages, as far as it can, and other ones in each
        turn: with one seed for all, turns that begin alike would go on alike.
        """
        said = [{"role": "system", "content": self.system}, {"role": "user", "content": question}]
        episode = Episode(messages=said)
        await self.go_on(client, model, tools, episode, max_tokens, seed)
        return episode

    async def go_on(
        self,
        client: AsyncOpenAI,
        model: str,
        tools: Tools,
        episode: Episode,
        max_tokens: int,
        seed: int | None = None,
    ) -> None:
        """Ask the model about what was said so far, until it answers; as `play`."""
        messages = episode.messages
        for turn in range(self.turns_max):
            try:
                response = await client.chat.completions.create(
                    model=model,
                    messages=messages,
                    tools=self.definitions,
                    temperature=TEMPERATURE,
                    max_tokens=max_tokens,
                    seed=omit if seed is None else seed * self.turns_max + turn,
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
