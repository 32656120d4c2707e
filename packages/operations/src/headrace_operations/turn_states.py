"""States of turns, experiences and reports from which the turn account is built, and feedback without an effect."""

from __future__ import annotations

import collections
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace_schemas import Feedback, RestoredOutcome, RevertedOutcome, TrainingOutcome
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.events.opinion import Kind
from headrace_schemas.rules.training import TokenKind, unused_reason


@dataclass(slots=True)
class TurnState:
    """State of one turn, collected from its events on all topics."""

    model: str = ""
    session_key: str = ""
    captured: bool = False
    eval: bool = False
    trajectory: str | None = None
    left_out: str | None = None
    untrained: str | None = None
    """The reason why no version is trained on the turn although it is not an evaluation, or None."""
    no_logprobs: str | None = None
    """Why algorithms that need logprobs leave the turn out; None if they train it."""
    tokens: tuple[TokenKind, int] = ("left_out", 0)
    """How the tokens of the turn's answers were sampled, and their number."""
    experiences: list[str] = field(default_factory=list)


_REASONS_MAX = 64
"""Reasons that are listed. Reasons of failed experiences are texts of errors, of which there can be any number."""
TurnKey = tuple[str, str]
"""Tenant and turn id: turn ids of different tenants are unrelated."""


@dataclass(slots=True)
class ExperienceState:
    """An experience: its turns, its newest revision and the event id of each revision."""

    model: str
    tenant: str
    trajectory: str
    turn_ids: frozenset[str]
    revision: int
    event_ids: dict[int, str]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The outcomes in a lineage's training report about one save (checkpoint of the trainer)."""

    lineage: str
    account: int
    verdicts: tuple[TrainingOutcome, ...]
    undone: tuple[RevertedOutcome, ...]
    restored: tuple[RestoredOutcome, ...]


def count_tokens(turns: Iterable[TurnState]) -> dict[str, int]:
    """Return the number of tokens of captured turns by how they were sampled. Evaluations are not counted."""
    counts: Counter[str] = Counter()
    for kind, tokens in (turn.tokens for turn in turns if turn.captured and not turn.eval):
        counts[kind] += tokens
    return {kind: count for kind, count in sorted(counts.items()) if count}


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the most frequent reasons in the order of `counts`, and the number of all others as `other`."""
    if len(counts) <= _REASONS_MAX:
        return dict(counts)
    frequent = set(sorted(counts, key=lambda reason: -counts[reason])[: _REASONS_MAX - 1])
    rest = sum(count for reason, count in counts.items() if reason not in frequent)
    return {**{reason: count for reason, count in counts.items() if reason in frequent}, "other": rest}


FeedbackKey = tuple[str, str]
"""Tenant and feedback id, or tenant and turn id."""


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """A captured turn with the facts that decide whether feedback about it can be trained."""

    session_key: str
    untrained: str | None
    """The reason why no algorithm trains the turn; None if some algorithm does."""
    no_logprobs: str | None = None
    """The reason why algorithms that need logprobs leave the turn out; None if they train it."""
    in_sampled_branch: bool = False
    """Whether another answer in the turn's branch has logprobs, so that a value of the turn may train that answer."""
    learns: LearnedSignals | None = None
    """Signals from which the trainer of the turn's model learns, or None if the trainer did not announce them."""

    def unused_reason(self, kind: Kind) -> str | None:
        """Return the reason why feedback about the turn trains nothing, or None if it may be trained."""
        if self.learns is None:
            return self.untrained
        lacking = None if kind == "value" and self.in_sampled_branch else self.no_logprobs
        return unused_reason(kind, self.untrained, lacking, self.learns)


@dataclass(frozen=True, slots=True)
class _Judgement:
    """One feedback event with the turns that it is about; without turns it is about its session."""

    name: FeedbackKey
    session_key: str
    turn_ids: frozenset[str]
    kind: Kind


class UnusedFeedback:
    """Counter of feedback events that trained nothing.

    Call `add` with every feedback event at least once, then `count`.
    """

    def __init__(self) -> None:
        self._judgements: dict[FeedbackKey, _Judgement] = {}

    def add(self, event: Feedback) -> None:
        """Add a feedback event about turns or a session.

        Feedback about a task is ignored: it may apply to future runs.
        """
        if not event.has_content or event.level == "task":
            return
        answers = event.preference.pair if event.preference is not None else ()
        turn_ids = frozenset([*event.msg_ids, *(answer.turn_id for answer in answers)])
        name = event.tenant, event.feedback_id
        self._judgements[event.tenant, event.event_id] = _Judgement(
            name, event.session_key, turn_ids, event.feedback_kind
        )

    def count(self, turns: Mapping[FeedbackKey, CapturedTurn]) -> dict[str, int]:
        """Return the number of feedback events that trained nothing, by the reasons of their turns.

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
    """Return the reasons of its turns why a feedback event trains nothing.

    The result is empty if the event may be trained, or if some of its turns are not known.
    """
    reasons = [turn.unused_reason(judgement.kind) for turn in turns]
    causes = {reason for reason in reasons if reason is not None}
    return causes if judgement.kind == "preference" or (complete and None not in reasons) else set()
