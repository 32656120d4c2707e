"""Rerun of one prompt by one version: calls of the model, results of tools, and how it ended.

Only a part of a user's own session can be repeated: its first run, with the results of its tools.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from headrace_registry.rollouts.settings import RerunBounds
from headrace_schemas import FunctionCall, Message, Turn


def is_opening(turn: Turn) -> bool:
    """Return whether the turn is the first of its session and its prompt contains no answer of a model.

    Such a turn contains all that is needed to call another version with its prompt.
    """
    roles = {message.role for message in turn.messages}
    return turn.extends is None and turn.rendered and roles <= {"system", "developer", "user"}


def first_run(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns of the first run of a session: from the opening turn to the first answer without a tool call.

    Empty without an opening turn. The user's next message was a reply to that answer, so later turns cannot be repeated
    with another version.
    """
    run: list[Turn] = []
    for turn in turns:
        if (not run and is_opening(turn)) or (run and _continues(run[-1], turn)):
            run.append(turn)
        elif run:
            break
        if run and not run[-1].choices[0].message.tool_calls:
            break
    return tuple(run)


def is_single_run(turns: Sequence[Turn]) -> bool:
    """Return whether the session has no turns after its first run, so that its rewards and feedback are about that
    run."""
    return bool(turns) and len(first_run(turns)) == len(turns)


def _continues(before: Turn, turn: Turn) -> bool:
    prompt_length = len(before.messages)
    answered = turn.messages[prompt_length + 1 :]
    return (
        len(turn.messages) > prompt_length
        and turn.messages[:prompt_length] == before.messages
        and turn.messages[prompt_length].role == "assistant"
        and bool(answered)
        and all(message.role == "tool" for message in answered)
    )


def canonical_arguments(arguments: str) -> str:
    """Return equal strings for equal JSON arguments. Arguments that are not JSON are returned unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


@dataclass(slots=True)
class Recording:
    """Recorded results of the tool calls of a session, by tool and arguments."""

    results: dict[tuple[str, str], deque[str]] = field(default_factory=lambda: defaultdict(deque))

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Recording:
        """Record the tool results of all turns of a session, also of calls after its first run."""
        recording = cls()
        longest: Sequence[Message] = max((turn.messages for turn in turns), key=len, default=())
        calls = {call.id: call.function for item in longest for call in item.tool_calls or ()}
        for message in longest:
            called = calls.get(message.tool_call_id or "") if message.role == "tool" else None
            if called is not None:
                recording.results[called.name, canonical_arguments(called.arguments)].append(message.text)
        return recording

    def replay(self, call: FunctionCall) -> str | None:
        """Return the recorded result of a call, or None if it was never made.

        Repeated calls get the recorded results in their order, and then the last one again and again.
        """
        results = self.results.get((call.name, canonical_arguments(call.arguments)))
        if not results:
            return None
        return results.popleft() if len(results) > 1 else results[0]


@dataclass(frozen=True, slots=True)
class ScorableAnswer:
    """One sampled answer with its prompt, for which another version can compute logprobs."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float


def scorable_answers(turns: Sequence[Turn]) -> tuple[ScorableAnswer, ...] | None:
    """Return the sampled answers of a run with their prompts, for importance weights.

    None if one was not sampled from the version's own distribution, so that it has no weight.
    """
    if not turns or any(not turn.sampling.untruncated or len(turn.choices) != 1 for turn in turns):
        return None
    if any(turn.extends is not None for turn in turns):  # its prompt is not known
        return None
    return tuple(
        ScorableAnswer(
            tuple(turn.prompt_token_ids),
            tuple(turn.choices[0].token_ids),
            tuple(turn.choices[0].logprobs),
            turn.sampling.temperature,
        )
        for turn in turns
        if turn.choices[0].token_ids
    )


def log_weight(answers: Sequence[ScorableAnswer], logprobs: Sequence[Sequence[float]]) -> float:
    """Return the log importance weight of all answers of a run together.

    Args:
        logprobs: logprobs of the answers' tokens under the other version.
    """
    return math.fsum(
        candidate_logprob - logged_logprob
        for answer, answer_logprobs in zip(answers, logprobs, strict=True)
        for candidate_logprob, logged_logprob in zip(answer_logprobs, answer.logprobs, strict=True)
    )


Ended = Literal["answered", "other_call", "steps", "tokens", "failed"]
"""`answered`: with an answer that calls no tool, as in the user's session. `other_call`: it called a tool that may not
be called, with arguments that the user's session never used. `steps`, `tokens`: it reached a limit. `failed`: the model
could not be called."""


class RerunFailed(Exception):
    """The gateway or a tool did not answer; another attempt may help."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """Message that the model answered, and the number of tokens that the call took."""

    message: Message
    tokens: int


class ModelSession(Protocol):
    """Interface for calls of the model in one session of the shadow."""

    async def call_model(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        """Call a version, and return its answer to `messages`. Raises `RerunFailed`."""


class ReadOnlyTools(Protocol):
    """Interface that executes tools which have no side effects."""

    async def call(self, function: FunctionCall) -> str:
        """Call a tool, and return its result. Raises `RerunFailed`."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Provider of tool results: from the tool itself if it is marked read-only, else from the recording."""

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
    """Result of letting one version answer a shadow's prompt again: how it ended, with the number of tokens."""

    ended: Ended
    tokens: int
    calls: int
    """Calls of the model."""


async def rerun(
    model_session: ModelSession, toolbox: Toolbox, version: str, prompt: Turn, bounds: RerunBounds
) -> Rerun:
    """Answer the prompt of an opening turn with a version, with up to `bounds.steps_max` model calls.

    Raises `RerunFailed`.
    """
    messages = list(prompt.messages)
    tokens = 0
    for step in range(1, bounds.steps_max + 1):
        answered = await model_session.call_model(version, prompt, messages)
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
