"""Metrics of a session that this package provides: its outcome (rewards, success, feedback of users) and the behaviour
of the version (tools, loops, refusals, length, time, cost)."""

from __future__ import annotations

import json
import re
from collections import Counter
from statistics import fmean

from headrace_registry.rollouts.metrics import SessionRecord, metric, of_source

_SUCCESS = 0.5
_DISSATISFIED = re.compile(
    r"^\W*(no|nope|wrong)\b[,.!]|\b(that|this|it)('s| is| was) (not (right|correct|what)|wrong|incorrect)"
    r"|\bnot what i (asked|meant|wanted)|\b(doesn'?t|didn'?t|still not|not) work(ing)?\b|\btry again\b"
    r"|\byou misunderst",
    re.IGNORECASE,
)


@of_source(higher_is_better=True)
def reward(session: SessionRecord, source: str) -> float | None:
    """Return the mean of the valid rewards of a source. With an empty source, return the mean of the means of all
    sources."""
    by_source: dict[str, list[float]] = {}
    for item in session.standing_rewards:
        if item.value is not None and source in ("", item.source):
            by_source.setdefault(item.source, []).append(item.value)
    return fmean(map(fmean, by_source.values())) if by_source else None


@of_source(higher_is_better=True)
def success(session: SessionRecord, source: str) -> float | None:
    """Return 1 if the session's reward is at least 1/2, else 0; None for a session without a reward.

    Args:
        session: the session.
        source: source of the reward; empty for the mean of all sources.
    """
    value = reward.compute(session, source)
    return None if value is None else float(value >= _SUCCESS)


@of_source(higher_is_better=False)
def missing(session: SessionRecord, source: str) -> float | None:
    """Return 1 if the session has no reward value of the source (none arrived, or it abstained, failed or timed out),
    else 0.

    This metric has a value for each session. It is a guardrail of its own: sessions without a reward are left out of
    the comparison of rewards, so a version that loses the rewards of its bad sessions would otherwise look better than
    it is.
    """
    return float(reward.compute(session, source) is None)


@of_source(higher_is_better=False)
def timed_out(session: SessionRecord, source: str) -> float | None:
    """Return 1 if a valid reward of the source timed out, else 0. This metric has a value for each session."""
    rewards = session.standing_rewards
    return float(any(item.outcome == "timed_out" and source in ("", item.source) for item in rewards))


@of_source(higher_is_better=True)
def satisfaction(session: SessionRecord, source: str) -> float | None:
    """Return the mean of the valid feedback values of users, by default from the source `feedback`."""
    values = [item.value for item in session.standing_feedback if item.metric_source == (source or "feedback")]
    given_values = [value for value in values if value is not None]
    return fmean(given_values) if given_values else None


@metric(higher_is_better=False)
def dissatisfied_follow_ups(session: SessionRecord) -> float | None:
    """Return the fraction of the user's follow-up messages that complain, recognized by a list of English phrases.

    Returns None for a session without a follow-up message.
    """
    dialogue = session.dialogue
    first_answer = next((index for index, message in enumerate(dialogue) if message.role == "assistant"), len(dialogue))
    follow_ups = [message.text for message in dialogue[first_answer:] if message.role == "user"]
    return fmean(bool(_DISSATISFIED.search(text)) for text in follow_ups) if follow_ups else None


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
    """Return the fraction of tool calls that failed: their arguments are not JSON, or their result reports an error.

    Returns None for a session without tool calls.
    """
    calls = [call for answer in session.answers for call in answer.tool_calls or ()]
    if not calls:
        return None
    results = {message.tool_call_id: message.text for message in session.dialogue if message.role == "tool"}
    errors = [not _is_json(call.function.arguments) or _is_error_result(results.get(call.id, "")) for call in calls]
    return fmean(errors)


@metric(higher_is_better=False)
def loops(session: SessionRecord) -> float | None:
    """Return 1 if the model repeated the same message or the same tool call three times or more in the session, else
    0."""
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
    """Return the fraction of answers that refuse a request, recognized by a list of English phrases."""
    texts = [message.text for message in session.answers if not message.tool_calls]
    return fmean(bool(_REFUSAL.search(text)) for text in texts) if texts else None


@metric(higher_is_better=False, bounds=(0.0, _TOKENS_MAX))
def length(session: SessionRecord) -> float | None:
    """Return the number of tokens that were sampled in the session."""
    return float(sum(turn.usage.completion_tokens for turn in session.turns)) if session.turns else None


@metric(higher_is_better=False, bounds=(0.0, _LATENCY_MAX_S))
def latency(session: SessionRecord) -> float | None:
    """Return the mean time in seconds between a request and the end of its answer, over the turns of the session."""
    return fmean((turn.time - turn.started_at).total_seconds() for turn in session.turns) if session.turns else None


@metric(higher_is_better=False, bounds=(0.0, _SESSION_TOKENS_MAX))
def cost(session: SessionRecord) -> float | None:
    """Return the number of prompt and sampled tokens of the session. Prices of tokens are not considered."""
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
