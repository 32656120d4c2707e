"""ReAct loop over an OpenAI-compatible model, and the tools with text arguments that it calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from openai import AsyncOpenAI, OpenAIError, omit

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam


TEMPERATURE = 1.0
"""Sampling temperature. An agent that learns must explore, and evaluation samples alike, so that it measures the same
behaviour."""


class Tools(Protocol):
    """Tools of an agent."""

    def call(self, name: str, arguments: str) -> str:
        """Execute a model's call. The call must be fast, and returns a text for the model if the call is invalid."""


@dataclass
class Episode:
    """A finished conversation about one question."""

    answer: str | None = None
    """Answer to the user, or None if the agent gave none."""
    response_ids: list[str] = field(default_factory=list)
    """Ids of all model calls, in order."""
    failure: str | None = None
    """Why the server could not be reached, after the client's own retries."""
    messages: list[Any] = field(default_factory=list)
    """Messages so far, without the answer to the user."""

    @property
    def calls(self) -> int:
        return len(self.response_ids) + (self.failure is not None)


@dataclass(frozen=True)
class Agent:
    """System prompt, tools, and limit of model calls for one answer."""

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
        """Answer `question` within `turns_max` model calls. Errors of the model or the server are not raised.

        With a `seed`, the server samples the same tokens for the same messages as far as possible. Each turn uses
        another seed, because turns with equal beginnings would otherwise continue equally.
        """
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": question}]
        episode = Episode(messages=messages)
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
        """Continue the conversation until the model answers, as `play` does."""
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


ERROR = "error: "
"""Beginning of the result of an invalid call. The model reads it and may try again."""


class WrongCall(Exception):
    """A model's call is invalid. The message is for the model."""


def definition(
    name: str, description: str, parameter: str, meaning: str, more: Mapping[str, object] | None = None
) -> ChatCompletionFunctionToolParam:
    """Return the definition of a tool for the model. `more` maps further parameters to their schemas."""
    properties = {parameter: {"type": "string", "description": meaning}, **(more or {})}
    schema: dict[str, object] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def only_argument(arguments: str, parameter: str) -> str:
    """Return the value of the only parameter in a call's JSON. Raises `WrongCall`."""
    return str(named_arguments(arguments, (parameter,))[parameter])


def named_arguments(arguments: str, parameters: Sequence[str]) -> dict[str, Any]:
    """Return the values of a call's JSON, which must have exactly these parameters. Raises `WrongCall`."""
    try:
        values = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        raise WrongCall("arguments are not JSON") from None
    if not isinstance(values, dict) or values.keys() != set(parameters):
        raise WrongCall(f"expected the argument {' and '.join(parameters)}")
    return values
