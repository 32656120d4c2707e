"""Feedback without effect, because no turn that it is about can be trained."""

from __future__ import annotations

import collections
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace_schemas import Feedback

FeedbackKey = tuple[str, str]
"""Tenant and feedback id, or tenant and turn id."""


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """A captured turn. `reason` is why it cannot be trained; None if it can."""

    session_key: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Judgement:
    """One feedback event with the turns that it is about; without turns it is about its session."""

    name: FeedbackKey
    session_key: str
    turn_ids: frozenset[str]
    is_preference: bool


class UnusedFeedback:
    """Counter of feedback that trained nothing. `add` every feedback event at least once, then call `count`."""

    def __init__(self) -> None:
        self._judgements: dict[FeedbackKey, _Judgement] = {}

    def add(self, event: Feedback) -> None:
        """Add the event if it judges turns. Feedback about a task may still apply to future runs, so it is ignored."""
        if not event.has_content or event.level == "task":
            return
        answers = event.preference.pair if event.preference is not None else ()
        turn_ids = frozenset([*event.msg_ids, *(answer.turn_id for answer in answers)])
        name = event.tenant, event.feedback_id
        self._judgements[event.tenant, event.event_id] = _Judgement(name, event.session_key, turn_ids, bool(answers))

    def count(self, turns: Mapping[FeedbackKey, CapturedTurn]) -> dict[str, int]:
        """Return the number of feedbacks that trained nothing, by the reasons of their turns.

        A preference needs both of its answers; other feedback has an effect if any of its turns can be trained.
        """
        by_session: dict[FeedbackKey, list[CapturedTurn]] = defaultdict(list)
        for (tenant, _), turn in turns.items():
            by_session[tenant, turn.session_key].append(turn)
        reasons: dict[FeedbackKey, set[str]] = defaultdict(set)
        used: set[FeedbackKey] = set()
        for judgement in self._judgements.values():
            tenant, _ = judgement.name
            keys = [(tenant, turn_id) for turn_id in judgement.turn_ids]
            known_turns = [turns[key] for key in keys if key in turns]
            if not keys:
                known_turns = by_session[tenant, judgement.session_key]
            all_known = bool(known_turns) and len(known_turns) >= len(keys)
            causes = _untrained_reasons(judgement, known_turns, complete=all_known)
            if causes:
                reasons[judgement.name] |= causes
            else:
                used.add(judgement.name)
        counts = collections.Counter(", ".join(sorted(reasons[name])) for name in reasons.keys() - used)
        return dict(sorted(counts.items()))


def _untrained_reasons(judgement: _Judgement, turns: Sequence[CapturedTurn], *, complete: bool) -> set[str]:
    """Return the reasons why the feedback trains nothing; empty if it may train, or if some turns are not known."""
    causes = {turn.reason for turn in turns if turn.reason is not None}
    if judgement.is_preference:
        return causes
    return causes if complete and all(turn.reason is not None for turn in turns) else set()
