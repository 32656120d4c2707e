"""Metrics of a version's behaviour: tools, loops, refusals, length, time, cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from statistics import fmean

from headrace_registry.rollouts.metrics import SessionRecord, metric

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
    """Return the share of tool calls that failed: with arguments that are not JSON, or a result that reports an error.

    Abstains when no tool was called.
    """
    calls = [call for answer in session.answers for call in answer.tool_calls or ()]
    if not calls:
        return None
    results = {message.tool_call_id: message.text for message in session.dialogue if message.role == "tool"}
    errors = [not _is_json(call.function.arguments) or _is_error_result(results.get(call.id, "")) for call in calls]
    return fmean(errors)


@metric(higher_is_better=False)
def loops(session: SessionRecord) -> float | None:
    """Return 1 if the model repeated the same message or the same call three times or more in the session, else 0."""
    if not session.answers:
        return None
    repetitions = Counter(
        (message.text, tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ()))
        for message in session.dialogue
        if message.role == "assistant"
    )
    return float(any(count >= _REPEATED for count in repetitions.values()))


@metric(higher_is_better=False)
def refusals(session: SessionRecord) -> float | None:
    """Return the share of answers that refuse, recognised by a list of English phrases."""
    texts = [message.text for message in session.answers if not message.tool_calls]
    return fmean(bool(_REFUSAL.search(text)) for text in texts) if texts else None


@metric(higher_is_better=False, bounds=(0.0, _TOKENS_MAX))
def length(session: SessionRecord) -> float | None:
    """Return the number of tokens that were sampled in the session."""
    return float(sum(turn.usage.completion_tokens for turn in session.turns)) if session.turns else None


@metric(higher_is_better=False, bounds=(0.0, _LATENCY_MAX_S))
def latency(session: SessionRecord) -> float | None:
    """Return the mean time in seconds from a request to the end of its answer, over the turns."""
    return fmean((turn.time - turn.started_at).total_seconds() for turn in session.turns) if session.turns else None


@metric(higher_is_better=False, bounds=(0.0, _SESSION_TOKENS_MAX))
def cost(session: SessionRecord) -> float | None:
    """Return the number of prompt and sampled tokens of the session. Prices of tokens need a metric of your own."""
    if not session.turns:
        return None
    return float(sum(turn.usage.prompt_tokens + turn.usage.completion_tokens for turn in session.turns))


def _is_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _is_error_result(result: str) -> bool:
    try:
        content = json.loads(result)
    except (ValueError, RecursionError):
        return bool(_ERROR.search(result))
    return isinstance(content, dict) and bool(content.get("error") or content.get("isError") or content.get("is_error"))
