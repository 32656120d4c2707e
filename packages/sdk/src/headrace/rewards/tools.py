"""Whether an agent called the right tools, with the right arguments, and whether its calls worked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_schemas import Message, Tool, ToolCall

Call = Mapping[str, Any]
"""An expected call: its `name`, and `arguments` of which all that are named have to agree."""
_FAILED = ("error", "traceback", "exception", "failed", "invalid")


@dataclass(frozen=True, slots=True)
class ToolScore:
    """Shares from 0 to 1, and None where there is nothing to judge."""

    tool: float | None
    """Of the expected calls: those whose tool was called."""
    arguments: float | None
    """Of the expected calls: those made with the expected arguments."""
    success: float | None
    """Of the calls that got an answer: those whose answer is no error."""
    invalid: float | None
    """Of the calls that were made: those that name no offered tool or whose arguments are no JSON object."""
    calls: int
    """How many calls were made."""

    @property
    def value(self) -> float | None:
        """The mean of what could be judged, with invalid calls counted against it."""
        judged = [one for one in (self.tool, self.arguments, self.success) if one is not None]
        if self.invalid is not None:
            judged.append(1 - self.invalid)
        return sum(judged) / len(judged) if judged else None


def tool_score(messages: Sequence[Message], tools: Iterable[Tool], expected: Sequence[Call] = ()) -> ToolScore:
    """Scores the calls of a conversation. Each call that was made stands for one expected call at most."""
    made = [call for message in messages for call in message.tool_calls or ()]
    offered = {tool.function.name for tool in tools}
    arguments = [_arguments(call) for call in made]
    named = [call.function.name for call in made]
    wrong = [
        found is None or (bool(offered) and name not in offered) for name, found in zip(named, arguments, strict=True)
    ]
    answers = {message.tool_call_id: message.text for message in messages if message.role == "tool"}
    answered = [answers[call.id] for call in made if call.id in answers]
    return ToolScore(
        tool=_share(_matched([one["name"] for one in expected], named), len(expected)),
        arguments=_share(_agreed(expected, list(zip(named, arguments, strict=True))), len(expected)),
        success=_share(sum(not failed(text) for text in answered), len(answered)),
        invalid=_share(sum(wrong), len(made)),
        calls=len(made),
    )


def failed(answer: str) -> bool:
    """Whether a tool's answer is an error: a JSON object with an `error`, or a text that begins like one."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return answer.lstrip().casefold().startswith(_FAILED)
    if isinstance(found, dict):
        return bool(found.get("error")) or found.get("status") in ("error", "failed") or found.get("ok") is False
    return isinstance(found, str) and found.lstrip().casefold().startswith(_FAILED)


def _matched(expected: Iterable[str], named: Sequence[str]) -> int:
    left = list(named)
    found = 0
    for name in expected:
        if name in left:
            left.remove(name)
            found += 1
    return found


def _agreed(expected: Sequence[Call], made: list[tuple[str, Mapping[str, Any] | None]]) -> int:
    found = 0
    for wanted in sorted(expected, key=lambda one: -len(one.get("arguments") or {})):  # those that ask most first
        fits = next((call for call in made if _agrees(wanted, *call)), None)
        if fits is not None:
            made.remove(fits)
            found += 1
    return found


def _agrees(wanted: Call, name: str, arguments: Mapping[str, Any] | None) -> bool:
    if name != wanted["name"] or arguments is None:
        return False
    return all(
        key in arguments and _equal(arguments[key], value) for key, value in (wanted.get("arguments") or {}).items()
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.strip() == other.strip()
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _arguments(call: ToolCall) -> Mapping[str, Any] | None:
    try:
        found = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
