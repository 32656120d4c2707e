"""Rerun of one prompt: a version answers it again, with model calls and tool results.

Only the first run of a user's session can be repeated, with the recorded results of its tools.
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
    """Return whether a turn is the first of its session and its prompt contains no answer of a model.

    The prompt of such a turn can be sent to another version.
    """
    roles = {message.role for message in turn.messages}
    return turn.extends is None and turn.rendered and roles <= {"system", "developer", "user"}


def first_run(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns of the first run of a session: from the first turn to the first answer without a tool call.

    The result is empty if the session has no opening turn. Later turns cannot be repeated with another version, because
    the user's next message replied to the answer of this version.
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
    """Return whether the session consists only of its first run, so that its rewards and feedback are about that
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
    """Return the JSON `arguments` in a canonical form, in which equal arguments are equal texts. Other texts are
    returned unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


@dataclass(slots=True)
class Recording:
    """Results of the tool calls of a session, by tool and arguments."""

    results: dict[tuple[str, str], deque[str]] = field(default_factory=lambda: defaultdict(deque))

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Recording:
        """Collect the tool results in all turns of a session, including those after its first run."""
        recording = cls()
        longest: Sequence[Message] = max((turn.messages for turn in turns), key=len, default=())
        calls = {call.id: call.function for item in longest for call in item.tool_calls or ()}
        for message in longest:
            called = calls.get(message.tool_call_id or "") if message.role == "tool" else None
            if called is not None:
                recording.results[called.name, canonical_arguments(called.arguments)].append(message.text)
        return recording

    def replay(self, call: FunctionCall) -> str | None:
        """Return the recorded result of a call, or None if the session has no call with the same tool and arguments.

        If the session repeated the call, the results are returned one after the other, and then the last one each time.
        """
        results = self.results.get((call.name, canonical_arguments(call.arguments)))
        if not results:
            return None
        return results.popleft() if len(results) > 1 else results[0]


@dataclass(frozen=True, slots=True)
class ScorableAnswer:
    """Sampled answer with its prompt, for which the logprobs of another version can be computed."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float


def scorable_answers(turns: Sequence[Turn]) -> tuple[ScorableAnswer, ...] | None:
    """Return the sampled answers of a run with their prompts, from which importance weights are computed.

    Returns None if an answer was not sampled from the version's full distribution, so that it has no importance weight.
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
    """Return the logarithm of the importance weight of a run, which is the product of those of its answers.

    Args:
        logprobs: for each answer, the logprobs of its tokens under the other version.
    """
    return math.fsum(
        candidate_logprob - logged_logprob
        for answer, answer_logprobs in zip(answers, logprobs, strict=True)
        for candidate_logprob, logged_logprob in zip(answer_logprobs, answer.logprobs, strict=True)
    )


Ended = Literal["answered", "other_call", "steps", "tokens", "failed"]
"""How a rerun ended. `answered`: with an answer without a tool call. `other_call`: the model called a tool without a
recorded result. `steps`, `tokens`: a limit was reached. `failed`: the model could not be called."""


class RerunFailed(Exception):
    """Raised if the gateway or a tool did not respond. Another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """Answer of the model, and the number of tokens of the call."""

    message: Message
    tokens: int


class ModelSession(Protocol):
    """Session of a shadow in which a version is called."""

    async def call_model(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        """Call a version with `messages`, and return its answer. Raises `RerunFailed`."""


class ReadOnlyTools(Protocol):
    """Tools without side effects that may be executed in a shadow."""

    async def call(self, function: FunctionCall) -> str:
        """Execute a tool call, and return its result. Raises `RerunFailed`."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Source of tool results: a read-only tool is executed; the results of other tools are replayed from the
    recording."""

    read_only: Collection[str]
    tools: ReadOnlyTools
    recording: Recording

    async def result(self, function: FunctionCall) -> str | None:
        """Return the result of a tool call, or None if the tool is not read-only and the call was not recorded."""
        if function.name in self.read_only:
            return await self.tools.call(function)
        return self.recording.replay(function)


@dataclass(frozen=True, slots=True)
class Rerun:
    """Result of a rerun: how it ended, and the numbers of tokens and model calls."""

    ended: Ended
    tokens: int
    calls: int
    """Number of model calls."""


async def rerun(
    model_session: ModelSession, toolbox: Toolbox, version: str, prompt: Turn, bounds: RerunBounds
) -> Rerun:
    """Let a version answer the prompt of an opening turn again, with at most `bounds.steps_max` model calls.

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
