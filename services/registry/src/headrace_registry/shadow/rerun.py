"""One prompt answered anew by one version: calls of the model, results of tools, and why it ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace_registry.shadow.recording import Recording
from headrace_schemas import FunctionCall, Message, Turn

Ended = Literal["answered", "other_call", "steps", "tokens", "failed"]
"""`answered`: as the user's session did, with an answer that calls no tool. `other_call`: it called a tool that may
not be called, with what the user's session never asked of it. `steps`, `tokens`: it came to a bound. `failed`: nobody
could answer."""


class RerunFailed(Exception):
    """The gateway or a tool did not answer; another try may help."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the model said, and what that cost."""

    message: Message
    tokens: int


class Answering(Protocol):
    """Calls the model, for one session of the shadow."""

    async def ask(self, version: str, prompt: Turn, messages: Sequence[Message]) -> Answered:
        """Raises `RerunFailed`."""


class ReadOnlyTools(Protocol):
    """Really calls tools."""

    async def call(self, function: FunctionCall) -> str:
        """Raises `RerunFailed`."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What a call is answered with: the tool itself only where it is marked read-only, else what was recorded."""

    read_only: Collection[str]
    tools: ReadOnlyTools
    recording: Recording

    async def result(self, function: FunctionCall) -> str | None:
        """None: nothing may answer this call."""
        if function.name in self.read_only:
            return await self.tools.call(function)
        return self.recording.replay(function)


@dataclass(frozen=True, slots=True)
class RerunBounds:
    """What one rerun may take."""

    steps_max: int
    tokens_max: int


@dataclass(frozen=True, slots=True)
class Rerun:
    """How it went."""

    ended: Ended
    tokens: int
    calls: int
    """Of the model."""


async def rerun(asking: Answering, toolbox: Toolbox, version: str, prompt: Turn, bounds: RerunBounds) -> Rerun:
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
