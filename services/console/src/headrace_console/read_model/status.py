"""Status of turns as a pure function of rows, and the contribution of each turn to the counts.

A turn is counted once under lineage 0, with its status before any training. For each lineage with outcomes for the
turn, further counts have the difference between its status there and that status. So the sum of both is exact for every
lineage, and no row changes when another lineage becomes the latest one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.rows import OTHER, ExperienceRow, Names, TrajectoryRow, TurnRow
from headrace_schemas import RestoredOutcome, RevertedOutcome, TrainingOutcome
from headrace_schemas.rules.training import (
    LineageOutcomes,
    RevisionOutcome,
    TurnFacts,
    TurnStatus,
    turn_statuses,
)

_OUTCOME, _UNDONE, _RESTORED = range(3)
_OUTCOME_DEFAULTS = (None, None, (), None, ())
"""Values that an outcome's entry may lack at its end: `dropped`, reason, left-out turns, advantage, turn advantages."""
_ENTRY_LENGTH_MIN = 4
_HISTORY_MAX = 256
_REVISIONS_KEPT = 32
_TURNS_KEPT = 256
"""Largest number of turn advantages that are stored for an outcome: those with the largest absolute values."""


class CountKey(NamedTuple):
    """Primary key of a row of the table `counts`, which counts turns."""

    tenant: int
    model: int
    lineage: int
    status: int


@dataclass(frozen=True, slots=True)
class TurnState:
    """Facts that decide the status of a captured turn, from its own event and from the trajectory that contains it."""

    turn: TurnRow
    model: int
    facts: TurnFacts
    no_logprobs: str | None


def status_name(status: TurnStatus) -> str:
    """Return the name of a status and its detail, such as `dropped/stale`."""
    return "/".join(status)


def split_status(name: str) -> TurnStatus:
    """Return the status and the detail of a name such as `dropped/stale`. The inverse of `status_name`."""
    status, _, detail = name.partition("/")
    return status, detail


def state_of(turn: TurnRow, trajectories: Iterable[TrajectoryRow], names: Names) -> TurnState | None:
    """Return the state of a turn, or None if it is not captured.

    Args:
        turn: the turn.
        trajectories: the published trajectories that contain the turn. An accepted one has precedence.
        names: the table of texts that the rows refer to by number.
    """
    trajectory = min(trajectories, key=lambda row: (row.refused, row.id), default=None)
    untrained, model = turn.untrained, turn.model
    no_logprobs = None if turn.no_logprobs is None else names.text(turn.no_logprobs)
    captures = trajectory is not None and (trajectory.ingested or (trajectory.refused and not turn.is_captured))
    if not (turn.is_captured or captures):
        return None
    left_out = None
    if trajectory is not None:
        untrained = untrained or trajectory.untrained
        left_out = _reason(trajectory.left_out, turn.id, names)
        if captures:
            model, no_logprobs = trajectory.model, _reason(trajectory.no_logprobs, turn.id, names)
    facts = TurnFacts(
        eval=turn.eval or (trajectory is not None and trajectory.eval),
        untrained=None if untrained is None else names.text(untrained),
        left_out=left_out,
        in_trajectory=trajectory is not None,
        refused=turn.refused if trajectory is None else trajectory.refused,
    )
    return TurnState(turn, model, facts, no_logprobs)


def _reason(reasons: Mapping[int, int], turn: int, names: Names) -> str | None:
    number = reasons.get(turn)
    return None if number is None else names.text(number)


class Statuses:
    """Computes the status of turns. It caches outcomes of experiences, so no row may change while it is in use."""

    def __init__(self, names: Names) -> None:
        """Create the computation. `names` is the table of texts that the rows refer to by number."""
        self._names = names
        self._outcomes: dict[tuple[int, int], LineageOutcomes] = {}

    def status(self, state: TurnState, experiences: Sequence[ExperienceRow], lineage: int) -> int:
        """Return the number of a turn's status in a lineage, as `names` has it. In lineage 0 nothing counts as
        trained.
        """
        turn_id = unpack_id(state.turn.name)
        several = len(experiences) > 1
        ordered = sorted(experiences, key=lambda row: unpack_id(row.name)) if several else experiences
        in_training = [
            self._outcomes_of(row, lineage).status(turn_id, row.revision, state.no_logprobs, refused=row.refused)
            for row in ordered
        ]
        status, detail = turn_statuses(state.facts, in_training)[0]
        return self._names.shared_number(status_name((status, detail)), other=status_name((status, OTHER)))

    def count_changes(self, state: TurnState, experiences: Sequence[ExperienceRow]) -> Counter[CountKey]:
        """Return the number that a turn adds to each row of the table `counts`."""
        tenant, model = state.turn.tenant, state.model
        untrained = self.status(state, experiences, 0)
        changes = Counter({CountKey(tenant, model, 0, untrained): 1})
        for lineage in {int(entry[0]) for row in experiences for entry in row.history}:
            changes[CountKey(tenant, model, lineage, self.status(state, experiences, lineage))] += 1
            changes[CountKey(tenant, model, lineage, untrained)] -= 1
        return changes

    def _outcomes_of(self, row: ExperienceRow, lineage: int) -> LineageOutcomes:
        outcomes = self._outcomes.get((row.id, lineage))
        if outcomes is None:
            outcomes = self._outcomes[row.id, lineage] = outcomes_of(row, lineage, self._names)
        return outcomes


class HistoryEntry(NamedTuple):
    """Entry of an experience's training history: the outcome of one revision, or its later reversal or restoration.

    `save` is the number of the trainer's save (checkpoint) that reports the entry.
    """

    lineage: int
    save: int
    revision: int
    kind: str
    """`trained`, `dropped`, `undone`, `queued again` or `restored`."""
    reason: int
    """Number of the reason of a drop, or 0."""
    advantage: float | None = None
    """Mean advantage with which the whole experience was trained, or None if it is not known."""
    turns: tuple[tuple[int, float, bool], ...] = ()
    """Advantages of single turns: index of the turn in the experience, advantage, and whether an edit was trained."""
    left_out: tuple[str, ...] = ()
    """Turns that were not trained."""


def history_of(history: str | None) -> list[HistoryEntry]:
    """Parse the column `history` of an experience: its outcomes in the order of the trainer's saves (checkpoints)."""
    entries = []
    for lineage, save, kind, revision, *rest in sorted(json.loads(history or "[]"), key=lambda entry: entry[:3]):
        if kind == _OUTCOME:
            rest = _with_defaults(rest)
            name, reason = ("trained", 0) if rest[0] is None else ("dropped", rest[1])
        else:
            name, reason = "restored" if kind == _RESTORED else "queued again" if rest[0] else "undone", 0
        advantage, turns = rest[3:] if kind == _OUTCOME else (None, ())
        by_turn = tuple((index, value, bool(edited)) for index, value, edited in turns)
        left_out = tuple(rest[2]) if kind == _OUTCOME else ()
        entries.append(HistoryEntry(lineage, save, revision, name, reason, advantage, by_turn, left_out))
    return entries


def _with_defaults(rest: list[Any]) -> list[Any]:
    """Append default values for the optional fields that are missing at the end of a stored training outcome.

    Args:
        rest: stored fields after the revision, in the order of `_OUTCOME_DEFAULTS`; older outcomes have fewer.
    """
    return [*rest, *_OUTCOME_DEFAULTS[len(rest) :]]


def outcomes_of(row: ExperienceRow, lineage: int, names: Names) -> LineageOutcomes:
    """Return the outcomes of the revisions of an experience in a lineage."""
    outcomes = LineageOutcomes()
    entries = [entry for entry in row.history if entry[0] == lineage]
    for _, _, kind, revision, *rest in sorted(entries, key=lambda entry: (entry[1], entry[2])):
        if kind == _OUTCOME:
            dropped, reason, left_out, *_ = _with_defaults(rest)
            dropped, reason = (None if number is None else names.text(number) for number in (dropped, reason))
            outcomes.add(revision, RevisionOutcome(dropped, reason, frozenset(left_out)))
        elif kind == _UNDONE:
            outcomes.undo(RevertedOutcome(experience_id="-", revision=revision, queued=bool(rest[0])))
        else:
            outcomes.restore(RestoredOutcome(experience_id="-", revision=revision))
    return outcomes


def add_outcome(
    row: ExperienceRow, save: tuple[int, int], item: TrainingOutcome | RevertedOutcome | RestoredOutcome, names: Names
) -> None:
    """Add an outcome to the history of an experience.

    Args:
        row: the experience.
        save: the lineage and the number of the save (checkpoint of the trainer) that reports the outcome.
        item: the outcome, or its reversal.
        names: the table of texts that the rows refer to by number.
    """
    entry: list[Any]
    if isinstance(item, TrainingOutcome):
        texts = [None if text is None else names.shared_number(text) for text in (item.dropped, item.reason)]
        entry = [*save, _OUTCOME, item.revision, *texts, list(item.left_out), *_packed_advantages(item)]
        while entry[-1] in (None, []) and len(entry) > _ENTRY_LENGTH_MIN:
            entry.pop()
    elif isinstance(item, RevertedOutcome):
        entry = [*save, _UNDONE, item.revision, int(item.queued)]
    else:
        entry = [*save, _RESTORED, item.revision]
    entries = [*row.history, entry]
    row.history = _without_superseded_drops(entries, row.revision) if len(entries) > _HISTORY_MAX else entries


def _packed_advantages(item: TrainingOutcome) -> list[Any]:
    """Return the overall and the per-turn advantages of an outcome as stored in `history`; empty if it has none."""
    if item.advantage is None and not item.turn_advantages:
        return []
    indices = {turn_id: index for index, turn_id in enumerate(dict.fromkeys(item.turn_ids))}
    turns = [turn for turn in item.turn_advantages if turn.turn_id in indices]
    strongest = sorted(turns, key=lambda turn: -abs(turn.advantage))[:_TURNS_KEPT]
    by_turn = [[indices[turn.turn_id], _round(turn.advantage), int(turn.edited)] for turn in strongest]
    return [None if item.advantage is None else _round(item.advantage), by_turn]


def overall_advantage(item: TrainingOutcome) -> float | None:
    """Return the advantage by which lists sort a trained revision of an experience.

    It is the advantage of the whole branch if there is one, otherwise the largest absolute one among its answers.
    """
    if item.advantage is not None or not item.turn_advantages:
        return item.advantage
    return max((turn.advantage for turn in item.turn_advantages), key=abs)


def _round(advantage: float) -> float:
    """Round an advantage to six significant digits, to shorten its text in the database."""
    return float(f"{advantage:.6g}")


def _without_superseded_drops(entries: Sequence[Sequence[Any]], newest: int) -> list[Sequence[Any]]:
    """Return the history of an experience without the drops of old revisions, which decide no status any more.

    Drops of revisions that were undone or restored are not removed.

    Args:
        entries: stored history of an experience.
        newest: number of the newest revision of the experience.
    """
    reverted = {(entry[0], entry[3]) for entry in entries if entry[2] != _OUTCOME}
    return [
        entry
        for entry in entries
        if entry[2] != _OUTCOME
        or len(entry) == _ENTRY_LENGTH_MIN
        or entry[4] is None
        or (entry[0], entry[3]) in reverted
        or entry[3] > newest - _REVISIONS_KEPT
    ]
