"""Score tool calls: right tools, right arguments, and successful results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_schemas import Message, Tool, ToolCall

Call = Mapping[str, Any]
"""An expected call: its `name` and `arguments`. All named arguments must agree."""
_FAILED = ("error", "traceback", "exception", "failed", "invalid")


@dataclass(frozen=True, slots=True)
class ToolScore:
    """Shares from 0 to 1. A share is None if it does not apply to the run."""

    tool: float | None
    """Share of the expected calls with a call of their tool."""
    arguments: float | None
    """Share of the expected calls that were made with the expected arguments."""
    success: float | None
    """Share of the answered calls without an error."""
    invalid: float | None
    """Share of the actual calls with an unknown tool, or with arguments that are not a JSON object."""
    calls: int
    """Number of actual calls."""

    @property
    def value(self) -> float | None:
        """The mean of the shares that are not None, with 1 - `invalid` as one of them."""
        shares = [share for share in (self.tool, self.arguments, self.success) if share is not None]
        if self.invalid is not None:
            shares.append(1 - self.invalid)
        return sum(shares) / len(shares) if shares else None


def tool_score(messages: Sequence[Message], tools: Iterable[Tool], expected: Sequence[Call] = ()) -> ToolScore:
    """Score the calls of a conversation. Each actual call matches at most one expected call."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    offered = {tool.function.name for tool in tools}
    arguments = [_arguments(call) for call in calls]
    tool_names = [call.function.name for call in calls]
    invalid = [
        parsed is None or (bool(offered) and name not in offered)
        for name, parsed in zip(tool_names, arguments, strict=True)
    ]
    answers = {message.tool_call_id: message.text for message in messages if message.role == "tool"}
    answers_to_calls = [answers[call.id] for call in calls if call.id in answers]
    return ToolScore(
        tool=_share(_matching_tools([call["name"] for call in expected], tool_names), len(expected)),
        arguments=_share(_matching_calls(expected, list(zip(tool_names, arguments, strict=True))), len(expected)),
        success=_share(sum(not failed(text) for text in answers_to_calls), len(answers_to_calls)),
        invalid=_share(sum(invalid), len(calls)),
        calls=len(calls),
    )


def failed(answer: str) -> bool:
    """Return whether a tool's answer is an error: a JSON object with an `error`, or a text that begins like an
    error."""
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        return answer.lstrip().casefold().startswith(_FAILED)
    if isinstance(parsed, dict):
        return bool(parsed.get("error")) or parsed.get("status") in ("error", "failed") or parsed.get("ok") is False
    return isinstance(parsed, str) and parsed.lstrip().casefold().startswith(_FAILED)


def _matching_tools(expected: Iterable[str], named: Sequence[str]) -> int:
    unmatched = list(named)
    count = 0
    for name in expected:
        if name in unmatched:
            unmatched.remove(name)
            count += 1
    return count


def _matching_calls(expected: Sequence[Call], actual_calls: list[tuple[str, Mapping[str, Any] | None]]) -> int:
    count = 0
    by_arguments = sorted(expected, key=lambda call: -len(call.get("arguments") or {}))
    for expected_call in by_arguments:  # the most specific calls first, so that they get the only call that fits them
        match = next((call for call in actual_calls if _agrees(expected_call, *call)), None)
        if match is not None:
            actual_calls.remove(match)
            count += 1
    return count


def _agrees(expected_call: Call, name: str, arguments: Mapping[str, Any] | None) -> bool:
    if name != expected_call["name"] or arguments is None:
        return False
    return all(
        key in arguments and _equal(arguments[key], value)
        for key, value in (expected_call.get("arguments") or {}).items()
    )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, str) and isinstance(right, str):
        return left.strip() == right.strip()
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _arguments(call: ToolCall) -> Mapping[str, Any] | None:
    try:
        parsed = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _share(part: int, total: int) -> float | None:
    return part / total if total else None
