"""Metrics of how a version behaves: tools, loops, refusals, length, time, cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from statistics import fmean

from headrace_registry.rollouts.metrics import metric
from headrace_registry.rollouts.records import SessionRecord

_REPEATED = 3
_TOKENS_MAX = 8192.0
_SESSION_TOKENS_MAX = 262_144.0
_LATENCY_MAX_S = 60.0
_ERROR = re.compile(r"^\s*(error\b|exception\b|traceback \(most recent)", re.IGNORECASE)
_REFUSAL = re.compile(
    r"^\W*(i('m| am)? (sorry|afraid)\b.{0,40}\b(can('?t|not)|unable|won'?t)"
    r"|i (can('?t|not)|won'?t|am unable to|'m unable to) (help|assist|do that|comply|provide|answer)|as an ai\b)",
    re.IGNORECASE | re.DOTALL,
)


@metric(higher_is_better=False)
def tool_errors(session: SessionRecord) -> float | None:
    """The share of tool calls that went wrong: arguments that are no JSON, or a result that says that it is an error.

    Abstains when no tool was called.
    """
    calls = [call for answer in session.answers for call in answer.tool_calls or ()]
    if not calls:
        return None
    results = {one.tool_call_id: one.text for one in session.dialogue if one.role == "tool"}
    wrong = [not _is_json(call.function.arguments) or _says_error(results.get(call.id, "")) for call in calls]
    return fmean(wrong)


@metric(higher_is_better=False)
def loops(session: SessionRecord) -> float | None:
    """1 when the model said the same thing, or made the same call, three times or more in one session."""
    if not session.answers:
        return None
    said = Counter(
        (one.text, tuple((call.function.name, call.function.arguments) for call in one.tool_calls or ()))
        for one in session.dialogue
        if one.role == "assistant"
    )
    return float(any(times >= _REPEATED for times in said.values()))


@metric(higher_is_better=False)
def refusals(session: SessionRecord) -> float | None:
    """The share of answers that refuse, by a list of English phrases."""
    texts = [one.text for one in session.answers if not one.tool_calls]
    return fmean(bool(_REFUSAL.search(text)) for text in texts) if texts else None


@metric(higher_is_better=False, bounds=(0.0, _TOKENS_MAX))
def length(session: SessionRecord) -> float | None:
    """Sampled tokens of the session."""
    return float(sum(turn.usage.completion_tokens for turn in session.turns)) if session.turns else None


@metric(higher_is_better=False, bounds=(0.0, _LATENCY_MAX_S))
def latency(session: SessionRecord) -> float | None:
    """Seconds from a request to the end of its answer, on average over the turns."""
    return fmean((turn.time - turn.started_at).total_seconds() for turn in session.turns) if session.turns else None


@metric(higher_is_better=False, bounds=(0.0, _SESSION_TOKENS_MAX))
def cost(session: SessionRecord) -> float | None:
    """Tokens read and written for the session. What a token costs, a metric of your own knows."""
    if not session.turns:
        return None
    return float(sum(turn.usage.prompt_tokens + turn.usage.completion_tokens for turn in session.turns))


def _is_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _says_error(result: str) -> bool:
    try:
        found = json.loads(result)
    except (ValueError, RecursionError):
        return bool(_ERROR.search(result))
    return isinstance(found, dict) and bool(found.get("error") or found.get("isError") or found.get("is_error"))
