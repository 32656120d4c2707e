"""Status of a captured turn: trained, waiting or dropped, as a function of the events about it.

The account of all turns (`headrace status`) and the read model of the console apply the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace_schemas.events.checkpoint import Restored, TrainingOutcome, Undone
from headrace_schemas.events.trajectory import Trajectory
from headrace_schemas.rules.training import TokenKind

TurnStatus = tuple[str, str]
"""`trained`, `waiting` or `dropped`, and what the turn waits for or why it was dropped."""
TRAINED: TurnStatus = ("trained", "")
WAITING_FOR_TRAINING: TurnStatus = ("waiting", "training")
REFUSED: TurnStatus = ("dropped", "dead_letter")
TURN_ENDING_SOURCES = frozenset({("collector", "turns"), ("scorer", "trajectories"), ("trainer", "experiences")})
"""Service and source topic of dead letters that end a turn. A judge that refuses a trajectory only abstains."""


@dataclass(frozen=True, slots=True)
class TrajectoryFacts:
    """The parts of a trajectory on which the status of its turns depends."""

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

    @classmethod
    def of(cls, event: Trajectory) -> TrajectoryFacts:
        """Return the facts of a trajectory."""
        spans = [span for branch in event.branches for span in branch.spans]
        lengths: Counter[str] = Counter()
        for span in spans:
            lengths[span.turn_id] += len(span.logprobs)
        return cls(
            event.event_id,
            event.tenant,
            event.session_key,
            event.model,
            event.turn_ids,
            {item.turn_id: item.full_reason for item in event.left_out},
            {span.turn_id: span.no_logprobs for span in spans if span.no_logprobs is not None},
            {span.turn_id: (span.token_kind, lengths[span.turn_id]) for span in spans},
            event.untrained,
            eval=event.purpose == "eval",
            ingested=event.end_reason == "ingest",
        )


@dataclass(frozen=True, slots=True)
class RevisionOutcome:
    """Training outcome of one revision of an experience. The caller chooses the keys that stand for turns."""

    dropped: str | None
    reason: str | None
    left_out: frozenset[Hashable] = frozenset()
    """Turns of the experience that were not trained although the revision was."""
    turns: frozenset[Hashable] = frozenset()

    @classmethod
    def of(cls, outcome: TrainingOutcome) -> RevisionOutcome:
        """Return the outcome with the ids of turns as their keys."""
        return cls(outcome.dropped, outcome.reason, frozenset(outcome.left_out), frozenset(outcome.turn_ids))


@dataclass(slots=True)
class LineageOutcomes:
    """Outcomes of the revisions of one experience in one lineage.

    Outcomes must be applied in the order of the lineage's saves, because an undone revision may be trained again later.
    Within a save, `undo` and `restore` follow after `add`.
    """

    outcomes: dict[int, RevisionOutcome] = field(default_factory=dict)
    """Valid outcome by revision."""
    _undone: dict[int, bool] = field(default_factory=dict)
    """By undone revision: whether it is queued for training again."""
    _undone_outcomes: dict[int, RevisionOutcome] = field(default_factory=dict)
    """Reverted outcome by undone revision."""

    def add(self, revision: int, outcome: RevisionOutcome) -> bool:
        """Apply an outcome. Return False if the revision was trained before and is reported as trained again."""
        earlier = self.outcomes.get(revision)
        if earlier is None or earlier.dropped is not None:
            self.outcomes[revision] = outcome
            return True
        return outcome.dropped is not None

    def undo(self, undone: Undone) -> bool:
        """Revert an outcome. Return False if there was nothing to revert."""
        outcome = self.outcomes.pop(undone.revision, None)
        was_held = outcome is not None and (outcome.dropped is None or undone.queued)
        # An earlier report may have undone the revision without queueing it; now it is queued after all.
        requeued = undone.queued and self._undone.get(undone.revision) is False
        if outcome is not None:
            self._undone_outcomes[undone.revision] = outcome
        self._undone[undone.revision] = undone.queued
        return was_held or requeued

    def restore(self, restored: Restored) -> bool:
        """Make an undone revision trained again. Return False if it was not undone."""
        outcome = self._undone_outcomes.pop(restored.revision, None)
        if outcome is None:
            return False
        self.outcomes[restored.revision] = replace(outcome, dropped=None)
        return True

    def status(self, turn: Hashable, revision: int, no_logprobs: str | None, *, refused: bool) -> TurnStatus:
        """Return the status of one turn of the experience: trained if a valid revision trained it, otherwise the status
        of the newest revision.

        Args:
            turn: the turn.
            revision: the newest revision of the experience.
            no_logprobs: the reason why the turn's answers lack logprobs, or None.
            refused: whether the trainer refused the newest revision.
        """
        if any(outcome.dropped is None and turn not in outcome.left_out for outcome in self.outcomes.values()):
            return TRAINED
        newest = self.outcomes.get(revision)
        if newest is not None and turn in newest.left_out:
            return "dropped", no_logprobs or "no_logprobs"
        if newest is not None and newest.dropped is not None:
            return "dropped", newest.reason or ""
        if refused:
            return REFUSED
        return ("dropped", "undone") if self._undone.get(revision) is False else WAITING_FOR_TRAINING


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """The facts about a captured turn on which its status depends, apart from its experiences."""

    eval: bool
    untrained: str | None
    """The reason why no version is trained on the turn although it is not an evaluation, or None."""
    left_out: str | None
    in_trajectory: bool
    refused: bool
    """Whether its trajectory was refused, or, without one, the turn itself."""


def turn_statuses(turn: TurnFacts, in_training: Sequence[TurnStatus]) -> list[TurnStatus]:
    """Return the statuses that events give a turn, the valid one first. A second one contradicts the first.

    Args:
        turn: the facts about the turn.
        in_training: the statuses of the turn's experiences, ordered by the ids of the experiences.
    """
    statuses: list[TurnStatus] = []
    if turn.eval:
        statuses.append(("dropped", "eval"))
    elif turn.untrained is not None:
        statuses.append(("dropped", turn.untrained))
    elif turn.left_out is not None:
        statuses.append(("dropped", turn.left_out))
    if TRAINED in in_training:
        statuses.append(TRAINED)
    elif WAITING_FOR_TRAINING in in_training:
        statuses.append(WAITING_FOR_TRAINING)
    elif in_training:
        statuses.append(in_training[0])
    if statuses:
        return statuses
    if turn.refused:
        return [REFUSED]
    return [("waiting", "reward" if turn.in_trajectory else "session")]
