"""Rewards for an answer (whether it is right, in the requested format, short, in few steps), and scores of its tool
calls."""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_schemas.values.linear_pattern import matches_whole_text

if TYPE_CHECKING:
    from headrace_schemas import Message, Tool, ToolCall


Expected = str | float | Sequence[str | float]
"""Right answer, or several alternative right answers."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?<=\d)(?!\d|\.\d)")
_FRACTION = re.compile(r"(?<![\w.])([-+]?\d+)\s*/\s*(\d+)(?![\w/])")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """Normalize a text as SQuAD does: NFKC, lower case, no punctuation, no English articles, single spaces."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(" " if letter in string.punctuation else letter for letter in plain)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def numbers_in(text: str) -> list[float]:
    """Return the numbers in a text in order, for example `1,234.5`, `-2e3` and `3/4`. `12%` is returned as 12."""
    plain = unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-")
    fractions = [match for match in _FRACTION.finditer(plain) if int(match[2])]
    numbers = [(match.start(), int(match[1]) / int(match[2])) for match in fractions]
    covered = [match.span() for match in fractions]
    for match in _NUMBER.finditer(plain):
        inside = any(start <= match.start() < stop for start, stop in covered)
        if not inside:
            numbers.append((match.start(), float(match[0].replace(",", ""))))
    return [value for _, value in sorted(numbers) if math.isfinite(value)]


def accuracy(answer: str, expected: Expected, *, tolerance: float = 1e-6) -> float:
    """Return 1 for a right answer, else 0.

    An expected number is compared with the last number of the answer, because an answer that shows its work ends with
    its result. An expected text must be the whole answer after `normalized`, so that a list of all possible answers is
    wrong.

    Args:
        tolerance: permitted difference from an expected number: relative if that is above 1, else absolute.
    """
    if isinstance(expected, str | int | float):
        return float(_is_right(answer, expected, tolerance))
    return float(any(_is_right(answer, alternative, tolerance) for alternative in expected))


def _is_right(answer: str, expected: str | float, tolerance: float) -> bool:
    if isinstance(expected, bool):
        return normalized(answer) in (("true", "yes") if expected else ("false", "no"))
    if isinstance(expected, str):
        normalized_expected = normalized(expected)
        return normalized(answer) == normalized_expected if normalized_expected else answer.strip() == expected.strip()
    numbers = numbers_in(answer)
    return bool(numbers) and abs(numbers[-1] - expected) <= tolerance * max(1.0, abs(expected))


def follows(answer: str, pattern: str | re.Pattern[str]) -> float:
    """Return 1 if the whole answer matches a regular expression, else 0. `.` also matches line breaks.

    Args:
        pattern: a string may come from any source and is matched in linear time, without look-around and
            back-references. A compiled `re.Pattern` is trusted, and Python matches it with its flags.

    Raises:
        ValueError: `pattern` cannot be matched in linear time; see `headrace_schemas.values.linear_pattern`.
    """
    if isinstance(pattern, re.Pattern):
        return float(pattern.fullmatch(answer.strip()) is not None)
    return float(matches_whole_text(answer.strip(), pattern))


_STEP = re.compile(r"^[ \t]*(?:(?:step\s*)?\d+[.):]|[-*\u2022])[ \t]+(\S.*)$", re.IGNORECASE | re.MULTILINE)


def length_penalty(reward: float, length: int, *, length_max: int = 1024, weight: float = 0.001) -> float:
    """Return the reward minus `weight` times the relative excess of `length` over `length_max`.

    The penalty never makes a reward negative, and a negative reward is unchanged.
    """
    over = max(0, length - length_max) / length_max
    return max(min(reward, 0.0), reward - weight * over)


def steps(reward: float, answer: str, *, bonus: float = 0.1, most: float = 0.5) -> float:
    """Return the reward plus `bonus` for each different step that the answer lists, up to `most` in total.

    Only a positive reward gets the bonus. Otherwise a model would learn to write steps instead of right answers.
    """
    if reward <= 0:
        return reward
    written = {step.strip().casefold() for step in _STEP.findall(answer)}
    return reward + min(bonus * len(written), most)


Call = Mapping[str, Any]
"""Expected tool call, with `name` and `arguments`. An actual call may have further arguments."""
_FAILED = ("error", "traceback", "exception", "failed", "invalid")


@dataclass(frozen=True, slots=True)
class ToolScore:
    """Scores of the tool calls of a run, each from 0 to 1, or None if it does not apply."""

    tool: float | None
    """Fraction of the expected calls whose tool was called."""
    arguments: float | None
    """Fraction of the expected calls that were made with the expected arguments."""
    success: float | None
    """Fraction of the tool results that are not errors."""
    invalid: float | None
    """Fraction of the actual calls with an unknown tool, or with arguments that are not a JSON object."""
    calls: int
    """Number of actual calls."""

    @property
    def value(self) -> float | None:
        """Mean of the scores that are not None, where `invalid` enters as 1 - `invalid`; None without scores."""
        shares = [share for share in (self.tool, self.arguments, self.success) if share is not None]
        if self.invalid is not None:
            shares.append(1 - self.invalid)
        return sum(shares) / len(shares) if shares else None


def tool_score(messages: Sequence[Message], tools: Iterable[Tool], expected: Sequence[Call] = ()) -> ToolScore:
    """Compare the tool calls of a conversation with the offered tools and the expected calls. Each actual call matches
    at most one expected call."""
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
    """Return whether the result of a tool is an error: a JSON object with an `error`, or a text that begins like an
    error message."""
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
