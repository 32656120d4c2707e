"""States of turns, trajectories, experiences and reports from which the turn account is built."""

from __future__ import annotations

from collections.abc import Mapping
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


TurnKey = tuple[str, str]
"""Tenant and turn id: turn ids of different tenants are unrelated."""


@dataclass(frozen=True, slots=True)
class TrajectoryFacts:
    """The parts of a trajectory that the account needs, kept until it is known whether the trajectory was refused."""

    event_id: str
    tenant: str
    session_key: str
    model: str
    turn_ids: tuple[str, ...]
    left_out: Mapping[str, str]
    no_logprobs: Mapping[str, str]
    """Turns in branches whose answers lack logprobs, with the reasons."""
    tokens: Mapping[str, tuple[TokenKind, int]]
    """How the tokens of each turn in branches were sampled, and their number."""
    untrained: str | None
    eval: bool
    ingested: bool


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
