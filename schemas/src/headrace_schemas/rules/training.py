"""Rules about the training of a turn: whether it can be trained, its status, and which dead letters may be retried.

The account of all turns (`headrace status`) and the read model of the console apply the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from headrace_schemas.events.checkpoint import LearnedSignals, RestoredOutcome, RevertedOutcome, TrainingOutcome
from headrace_schemas.events.dead_letter import RETRY_HEADER, DeadLetter
from headrace_schemas.events.envelope import SEQUENCE_HEADER
from headrace_schemas.events.opinion import Kind
from headrace_schemas.events.trajectory import LeftOutReason, NoLogprobs, Trajectory
from headrace_schemas.events.turn import Turn

TABLES = frozenset({"replicas", "routing"})
"""Compacted topics: an old record would replace the newest one."""
_NOT_RETRIABLE = frozenset({("collector", "invalid_trajectory")})
"""Service and reason of letters about records that took effect before the refusal; a retry would be a duplicate."""
_KEY_LENGTH_MAX = 512


def left_out_reason(turn: Turn) -> LeftOutReason | None:
    """Return the reason why the turn cannot be in a branch, or None if it can.

    The reason `retried` is missing here, because only a later turn reveals a retry.
    """
    if not turn.delivered:
        return "undelivered"
    return None if any(choice.token_ids for choice in turn.choices) else "empty"


def no_logprobs_reason(turn: Turn) -> NoLogprobs | None:
    """Return the reason why algorithms that need the logprobs of the sampling policy cannot train the turn, or None.

    The distribution that the tokens were sampled from cannot be computed from the model's logits, or there is none, as
    in greedy decoding. The reason names a grammar, which the client may not have requested itself.
    """
    if turn.recomputable:
        return None
    return "truncated_sampling" if turn.sampling.grammar is None else "truncated_sampling (grammar)"


def untrained_reason(turn: Turn) -> str | None:
    """Return why no algorithm can train the turn, or None if some algorithm can.

    The reason is one of the words that the account of captured turns counts by: `eval` for a call of an evaluation,
    `undelivered`, `empty`, or the turn's own `untrained`.
    """
    return "eval" if turn.purpose == "eval" else turn.untrained or left_out_reason(turn)


TokenKind = Literal["free", "held", "stored", "shifted", "left_out"]
"""How tokens were sampled: from the model's own distribution, from the tokens of a grammar, from sets of tokens that
are stored with the turn, from all tokens with penalties or a bias, or so that algorithms that need logprobs leave them
out."""


def token_kind(turn: Turn) -> TokenKind:
    """Return how the tokens of the turn were sampled."""
    if untrained_reason(turn) is not None or no_logprobs_reason(turn) is not None:
        return "left_out"
    if turn.sampling.truncated:
        return "stored"
    if turn.sampling.grammar is not None:
        return "held"
    return "free" if turn.sampling.logit_shift is None else "shifted"


def unused_reason(kind: Kind, untrained: str | None, no_logprobs: str | None, learns: LearnedSignals) -> str | None:
    """Return the reason why feedback about a turn trains nothing, or None if it may be trained.

    Args:
        kind: Kind of the feedback.
        untrained: The reason why no algorithm trains the turn, or None.
        no_logprobs: The reason why the turn lacks logprobs that feedback of this kind needs, or None.
        learns: The signals that the algorithm trains.
    """
    if untrained is not None:
        return untrained
    if not {"value": learns.rewards, "edit": learns.edits, "preference": learns.preferences}[kind]:
        return "no_signal"
    return no_logprobs if learns.logprobs and kind != "edit" else None


def permanent_problem(letter: DeadLetter) -> str | None:
    """Return why the record of a dead letter must never be published again, or None if a valid one may be published."""
    if letter.source_topic in TABLES:
        return (
            f"{letter.source_topic} is a table: its producer publishes the newest row again, and an old row would win"
        )
    if (letter.service, letter.reason) in _NOT_RETRIABLE:
        return "its session is closed; only a replay can apply the record"
    key = letter.source_key or ""
    if "\ufffd" in key or len(key) >= _KEY_LENGTH_MAX:
        return "its key is not text or is longer than a dead letter stores"
    return None


def retry_headers(letter: DeadLetter, *, keeps_partition: bool) -> tuple[tuple[str, bytes], ...]:
    """Return the headers of the record that is published again.

    Args:
        letter: the dead letter.
        keeps_partition: whether the record returns to its original partition. Then the headers contain its original
            offset, by which consumers order it before the records that followed it.
    """
    headers = [(name, text.encode()) for name, text in letter.headers.items() if name != RETRY_HEADER]
    headers.append((RETRY_HEADER, letter.event_id.encode()))
    if keeps_partition and letter.source_offset is not None and SEQUENCE_HEADER not in letter.headers:
        headers.append((SEQUENCE_HEADER, str(letter.source_offset).encode()))
    return tuple(headers)


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
    """Training outcome of one revision of an experience, in which any hashable key chosen by the caller names a
    turn."""

    dropped: str | None
    reason: str | None
    left_out: frozenset[Hashable] = frozenset()
    """Turns of the experience that were not trained although the revision was."""
    turns: frozenset[Hashable] = frozenset()

    @classmethod
    def of(cls, outcome: TrainingOutcome) -> RevisionOutcome:
        """Convert a `TrainingOutcome` event, with turn ids as the keys of turns."""
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
        """Store the outcome of a revision. Return False if it is reported as trained although it was trained before."""
        earlier = self.outcomes.get(revision)
        if earlier is None or earlier.dropped is not None:
            self.outcomes[revision] = outcome
            return True
        return outcome.dropped is not None

    def undo(self, undone: RevertedOutcome) -> bool:
        """Revert the training outcome of a revision, because the weights went back to an earlier version. Return False
        if there was nothing to revert.
        """
        outcome = self.outcomes.pop(undone.revision, None)
        was_held = outcome is not None and (outcome.dropped is None or undone.queued)
        # An earlier report may have undone the revision without queueing it; now it is queued after all.
        requeued = undone.queued and self._undone.get(undone.revision) is False
        if outcome is not None:
            self._undone_outcomes[undone.revision] = outcome
        self._undone[undone.revision] = undone.queued
        return was_held or requeued

    def restore(self, restored: RestoredOutcome) -> bool:
        """Mark an undone revision of an experience as trained again. Return False if it was not undone."""
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
    """Facts about a captured turn that decide, with the outcomes of its experiences, whether it counts as trained,
    dropped or waiting.
    """

    eval: bool
    untrained: str | None
    """The reason why no version is trained on the turn although it is not an evaluation, or None."""
    left_out: str | None
    in_trajectory: bool
    refused: bool
    """Whether its trajectory was refused, or, without one, the turn itself."""


def turn_statuses(turn: TurnFacts, in_training: Sequence[TurnStatus]) -> list[TurnStatus]:
    """Return the valid status of a turn, followed by the status in its experiences if that contradicts the valid one.

    A contradiction is a turn that must not be trained, for example an evaluation, and yet is part of an experience.

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
