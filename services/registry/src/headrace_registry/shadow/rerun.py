"""One prompt answered again by one version: calls of the model, results of tools, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace_registry.shadow.recording import Recording
from headrace_registry.shadow.settings import RerunBounds
from headrace_schemas import FunctionCall, Message, Turn

Ended = Literal["answered", "other_call", "steps", "tokens", "failed"]
"""`answered`: with an answer that calls no tool, as in the user's session. `other_call`: it called a tool that may not
be called, with arguments that the user's session never used. `steps`, `tokens`: it reached a limit. `failed`: the model
could not be called."""


class RerunFailed(Exception):
    """The gateway or a tool did not answer; another attempt may help."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The model's message, and the tokens that the call took."""

    message: Message
    tokens: int


class ModelSession(Protocol):
    """Calls the model in one session of the shadow."""

    async def ask(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        """Return the model's answer. Raises `RerunFailed`."""


class ReadOnlyTools(Protocol):
    """Calls read-only tools."""

    async def call(self, function: FunctionCall) -> str:
        """Return the result of the tool. Raises `RerunFailed`."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Results for tool calls: from the tool itself where it is marked read-only, else from the recording."""

    read_only: Collection[str]
    tools: ReadOnlyTools
    recording: Recording

    async def result(self, function: FunctionCall) -> str | None:
        """Return the result of a call, or None if there is none for it."""
        if function.name in self.read_only:
            return await self.tools.call(function)
        return self.recording.replay(function)


@dataclass(frozen=True, slots=True)
class Rerun:
    """The outcome of one rerun."""

    ended: Ended
    tokens: int
    calls: int
    """Calls of the model."""


async def rerun(asking: ModelSession, toolbox: Toolbox, version: str, prompt: Turn, bounds: RerunBounds) -> Rerun:
    """Answer the prompt of an opening turn. Raises `RerunFailed`."""
    messages = list(prompt.messages)
    tokens = 0
    for step in range(1, bounds.steps_max + 1):
        answered = await asking.ask(version, prompt, messages)
        tokens += answered.tokens
        calls = answered.message.tool_calls or ()
        if not calls:
            return Rerun("answered", tokens, step)
        if tokens >= bounds.tokens_max:
            return Rerun("tokens", tokens, step)
        messages.append(answered.message)
        for call in calls:
            result = await toolbox.result(call.function)
            if result is None:
                return Rerun("other_call", tokens, step)
            messages.append(Message(role="tool", tool_call_id=call.id, content=result))
    return Rerun("steps", tokens, bounds.steps_max)
