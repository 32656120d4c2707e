"""Metrics of the outcome of a session: rewards, success, feedback of its user."""

from __future__ import annotations

import re
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
    """Return the mean of the current rewards of a source; with an empty source, the mean of all sources' means."""
    by_source: dict[str, list[float]] = {}
    for item in session.standing_rewards:
        if item.value is not None and source in ("", item.source):
            by_source.setdefault(item.source, []).append(item.value)
    return fmean(map(fmean, by_source.values())) if by_source else None


@of_source(higher_is_better=True)
def success(session: SessionRecord, source: str) -> float | None:
    """Return 1 if the reward is at least 1/2, else 0."""
    value = reward.compute(session, source)
    return None if value is None else float(value >= _SUCCESS)


@of_source(higher_is_better=False)
def missing(session: SessionRecord, source: str) -> float | None:
    """Return 1 if no reward of the source has a value: none came, or it abstained, failed or timed out. Never abstains.

    This metric is a guardrail of its own. Sessions without a reward are left out of the reward's comparison, so a
    version that loses the rewards of its bad sessions would look better than it is.
    """
    return float(reward.compute(session, source) is None)


@of_source(higher_is_better=False)
def timed_out(session: SessionRecord, source: str) -> float | None:
    """Return 1 if a current reward of the source timed out, else 0. Never abstains."""
    rewards = session.standing_rewards
    return float(any(item.outcome == "timed_out" and source in ("", item.source) for item in rewards))


@of_source(higher_is_better=True)
def satisfaction(session: SessionRecord, source: str) -> float | None:
    """Return the mean of the current feedback of users, from the source `feedback` unless another one is given."""
    values = [item.value for item in session.standing_feedback if item.metric_source == (source or "feedback")]
    given_values = [value for value in values if value is not None]
    return fmean(given_values) if given_values else None


@metric(higher_is_better=False)
def dissatisfied_follow_ups(session: SessionRecord) -> float | None:
    """Return the share of the user's follow-up messages that complain, recognised by a list of English phrases.

    Abstains without a follow-up.
    """
    dialogue = session.dialogue
    first_answer = next((index for index, message in enumerate(dialogue) if message.role == "assistant"), len(dialogue))
    follow_ups = [message.text for message in dialogue[first_answer:] if message.role == "user"]
    return fmean(bool(_DISSATISFIED.search(text)) for text in follow_ups) if follow_ups else None
