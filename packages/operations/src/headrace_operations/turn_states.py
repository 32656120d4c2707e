"""States of turns, experiences and reports from which the turn account is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace_schemas import Restored, TrainingOutcome, Undone
from headrace_schemas.rules.training import TokenKind


@dataclass(slots=True)
class TurnState:
    """State of one turn, collected from all topics."""

    model: str = ""
    session_key: str = ""
    captured: bool = False
    eval: bool = False
    trajectory: str | None = None
    left_out: str | None = None
    untrained: str | None = None
    """Why no version is trained on the turn, although it is not an evaluation."""
    no_logprobs: str | None = None
    """Why algorithms that need logprobs leave the turn out; None if they train it."""
    tokens: tuple[TokenKind, int] = ("left_out", 0)
    """How the tokens of its answers were sampled, and their number."""
    experiences: list[str] = field(default_factory=list)


_REASONS_MAX = 64
"""Reasons that are listed. Reasons of failed experiences are texts of errors, of which there can be any number."""
TurnKey = tuple[str, str]
"""Tenant and turn id: turn ids of different tenants are unrelated."""


@dataclass(slots=True)
class ExperienceState:
    """A branch on its way to training: its newest revision and the event id of each revision."""

    model: str
    tenant: str
    trajectory: str
    turn_ids: frozenset[str]
    revision: int
    event_ids: dict[int, str]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The part of a lineage's report about one save that the account needs."""

    lineage: str
    account: int
    verdicts: tuple[TrainingOutcome, ...]
    undone: tuple[Undone, ...]
    restored: tuple[Restored, ...]


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
