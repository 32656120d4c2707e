"""What the user's own session did, as far as a shadow can repeat it: the first run of it, and what its tools
answered."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_schemas import FunctionCall, Message, Turn


def is_opening(turn: Turn) -> bool:
    """Whether nobody has answered anything before it."""
    return all(message.role in ("system", "developer", "user") for message in turn.messages)


def first_run(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The opening turn, then what answers its tools, up to the first answer that calls none. Empty without an opening.

    What the user wrote next was written to that answer, so nothing behind it can be asked of another version.
    """
    found: list[Turn] = []
    for turn in turns:
        if (not found and is_opening(turn)) or (found and _continues(found[-1], turn)):
            found.append(turn)
        elif found:
            break
        if found and not found[-1].choices[0].message.tool_calls:
            break
    return tuple(found)


def is_whole(turns: Sequence[Turn]) -> bool:
    """Whether the session was this run alone: only then its rewards and its feedback are about it."""
    return bool(turns) and len(first_run(turns)) == len(turns)


def _continues(before: Turn, turn: Turn) -> bool:
    said = len(before.messages)
    answered = turn.messages[said + 1 :]
    return (
        len(turn.messages) > said
        and turn.messages[:said] == before.messages
        and turn.messages[said].role == "assistant"
        and bool(answered)
        and all(message.role == "tool" for message in answered)
    )


def canonical(arguments: str) -> str:
    """Equal for arguments that say the same; what is no JSON is compared as it stands."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


@dataclass(slots=True)
class Recording:
    """The results of a run's calls, by tool and arguments."""

    results: dict[tuple[str, str], deque[str]] = field(default_factory=lambda: defaultdict(deque))

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Recording:
        """Of all of a session: a call that it made later has the same result."""
        made = cls()
        longest: Sequence[Message] = max((turn.messages for turn in turns), key=len, default=())
        calls = {call.id: call.function for one in longest for call in one.tool_calls or ()}
        for message in longest:
            called = calls.get(message.tool_call_id or "") if message.role == "tool" else None
            if called is not None:
                made.results[called.name, canonical(called.arguments)].append(message.text)
        return made

    def replay(self, call: FunctionCall) -> str | None:
        """What the same call was answered; the next time the next answer, and the last one again and again. None: it
        was never made."""
        found = self.results.get((call.name, canonical(call.arguments)))
        if not found:
            return None
        return found.popleft() if len(found) > 1 else found[0]


@dataclass(frozen=True, slots=True)
class WeighedTokens:
    """One sampled answer with what it was sampled after: what another version has to say the logprobs of."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float


def weighed(turns: Sequence[Turn]) -> tuple[WeighedTokens, ...] | None:
    """The answers of a run; None where one of them was not sampled from the version's own distribution, and so has
    no weight."""
    if not turns or any(not turn.sampling.untruncated or len(turn.choices) != 1 for turn in turns):
        return None
    return tuple(
        WeighedTokens(
            tuple(turn.prompt_token_ids),
            tuple(turn.choices[0].token_ids),
            tuple(turn.choices[0].logprobs),
            turn.sampling.temperature,
        )
        for turn in turns
        if turn.choices[0].token_ids
    )


def log_weight(answers: Sequence[WeighedTokens], logprobs: Sequence[Sequence[float]]) -> float:
    """Of all of them together, from what the other version says of each token."""
    return math.fsum(
        theirs - ours
        for answer, said in zip(answers, logprobs, strict=True)
        for theirs, ours in zip(said, answer.logprobs, strict=True)
    )
