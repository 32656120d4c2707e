"""Metrics of what came of a session: rewards, success, what its user said."""

from __future__ import annotations

import re
from statistics import fmean

from headrace_registry.rollouts.metrics import metric, of_source
from headrace_registry.rollouts.records import SessionRecord

_SUCCESS = 0.5
_DISSATISFIED = re.compile(
    r"^\W*(no|nope|wrong)\b[,.!]|\b(that|this|it)('s| is| was) (not (right|correct|what)|wrong|incorrect)"
    r"|\bnot what i (asked|meant|wanted)|\b(doesn'?t|didn'?t|still not|not) work(ing)?\b|\btry again\b"
    r"|\byou misunderst",
    re.IGNORECASE,
)


@of_source(higher_is_better=True)
def reward(session: SessionRecord, source: str) -> float | None:
    """The mean of what the source's standing rewards say; of the sources' means when none is named."""
    by_source: dict[str, list[float]] = {}
    for one in session.standing_rewards:
        if one.value is not None and source in ("", one.source):
            by_source.setdefault(one.source, []).append(one.value)
    return fmean(map(fmean, by_source.values())) if by_source else None


@of_source(higher_is_better=True)
def success(session: SessionRecord, source: str) -> float | None:
    """1 when the reward is at least 1/2, else 0."""
    found = reward.compute(session, source)
    return None if found is None else float(found >= _SUCCESS)


@of_source(higher_is_better=False)
def missing(session: SessionRecord, source: str) -> float | None:
    """1 when no reward (of that source) has a value: none came, or it abstained, failed or timed out. Never abstains.

    A guardrail of its own: sessions without a reward are no part of the reward's comparison, and a version whose bad
    sessions end without one would look better than it is.
    """
    return float(reward.compute(session, source) is None)


@of_source(higher_is_better=False)
def timed_out(session: SessionRecord, source: str) -> float | None:
    """1 when a standing reward (of that source) timed out. Never abstains."""
    standing = session.standing_rewards
    return float(any(one.outcome == "timed_out" and source in ("", one.source) for one in standing))


@of_source(higher_is_better=True)
def satisfaction(session: SessionRecord, source: str) -> float | None:
    """The mean of users' standing feedback: of the source `feedback` unless another is named."""
    values = [one.value for one in session.standing_feedback if one.metric_source == (source or "feedback")]
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


@metric(higher_is_better=False)
def dissatisfied_follow_ups(session: SessionRecord) -> float | None:
    """The share of the user's follow-ups that complain, by a list of English phrases. Abstains without a follow-up."""
    dialogue = session.dialogue
    first = next((place for place, one in enumerate(dialogue) if one.role == "assistant"), len(dialogue))
    said = [one.text for one in dialogue[first:] if one.role == "user"]
    return fmean(bool(_DISSATISFIED.search(text)) for text in said) if said else None
