"""Observations from outside: requests, acknowledgements, feedback. The checkers compare everything with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace_schemas import Feedback, Reward, Turn

EndedBy = Literal["end_call", "feedback", "commit", "idle"]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Feedback, and the last turn that had been acknowledged when it was given."""

    feedback: Feedback
    after: Turn


@dataclass(slots=True)
class Run:
    """One run of an agent."""

    name: str
    session_id: str
    session_key: str
    tenant: str
    implied: bool
    """Whether the run shares its session with another run; feedback that lists its turns then distinguishes them."""
    ends_by: EndedBy
    turns: list[Turn] = field(default_factory=list)
    """Acknowledged turns, in order."""
    feedback: list[Acknowledged] = field(default_factory=list)
    """Acknowledged feedback about the run, in the order of acknowledgement."""
    follows_an_end: bool = False
    """Whether its session had been ended before it began."""
    over: bool = False
    """Whether the last of it was acknowledged."""


@dataclass(slots=True)
class Ledger:
    """Requests, acknowledgements and runs by id."""

    runs: list[Run] = field(default_factory=list)
    requested: dict[str, Turn] = field(default_factory=dict)
    """Every turn that a gateway was given, acknowledged or not."""
    acked: dict[str, Turn] = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=dict)
    """Run to ids of its acknowledged events, in the order in which they were."""
    critic: list[Reward] = field(default_factory=list)
    """Verdicts of a third party about trajectories."""
    unsaid: int = 0
    """Number of verdicts that the third party has still to send."""
    poison: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Places of records that are no events, and the reason that a dead letter shall give."""
    astray: set[str] = field(default_factory=set)
    """Ids of feedback about turns that do not exist."""
