"""Feedback that trains nothing, because no turn that it is about can be trained."""

from __future__ import annotations

import collections
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace_schemas import Feedback

Name = tuple[str, str]
"""Tenant and id."""


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """What the account knows of a captured turn. `reason`: why it cannot be trained; None: it may be."""

    session_key: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Judgement:
    """One event of a feedback, and the turns that it is about; none: its session."""

    name: Name
    session_key: str
    turn_ids: frozenset[str]
    is_preference: bool


class UntaughtFeedback:
    """`add` every feedback event once or more often, then `count`."""

    def __init__(self) -> None:
        self._judgements: dict[Name, _Judgement] = {}

    def add(self, event: Feedback) -> None:
        """Remember the event if it judges turns. One about a task may teach runs that are still to come."""
        if not event.has_content or event.level == "task":
            return
        answers = event.preference.pair if event.preference is not None else ()
        turn_ids = frozenset([*event.msg_ids, *(answer.turn_id for answer in answers)])
        name = event.tenant, event.feedback_id
        self._judgements[event.tenant, event.event_id] = _Judgement(name, event.session_key, turn_ids, bool(answers))

    def count(self, turns: Mapping[Name, CapturedTurn]) -> dict[str, int]:
        """Return the number of feedbacks that trained nothing, by the reasons of their turns.

        A preference needs both of its answers; all other feedback teaches if one of its turns may be trained.
        """
        by_session: dict[Name, list[CapturedTurn]] = defaultdict(list)
        for (tenant, _), turn in turns.items():
            by_session[tenant, turn.session_key].append(turn)
        reasons: dict[Name, set[str]] = defaultdict(set)
        taught: set[Name] = set()
        for judgement in self._judgements.values():
            tenant, _ = judgement.name
            places = [(tenant, turn_id) for turn_id in judgement.turn_ids]
            found = [turns[place] for place in places if place in turns]
            if not places:
                found = by_session[tenant, judgement.session_key]
            causes = _untaught(judgement, found, complete=bool(found) and len(found) >= len(places))
            if causes:
                reasons[judgement.name] |= causes
            else:
                taught.add(judgement.name)
        counts = collections.Counter(", ".join(sorted(reasons[name])) for name in reasons.keys() - taught)
        return dict(sorted(counts.items()))


def _untaught(judgement: _Judgement, turns: Sequence[CapturedTurn], *, complete: bool) -> set[str]:
    """Return the reasons why the event trains nothing; none if it may, or if not all of its turns are known."""
    causes = {turn.reason for turn in turns if turn.reason is not None}
    if judgement.is_preference:
        return causes
    return causes if complete and all(turn.reason is not None for turn in turns) else set()
