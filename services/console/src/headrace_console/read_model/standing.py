"""Standing of turns as a pure function of rows: what each turn adds to the counts.

The count of a turn is kept as its standing without any training, and, for each lineage that reported on it, as the
difference that this lineage makes. So the counts of every lineage are exact, and a change of the lineage that counts
changes no row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.rows import ExperienceRow, Names, TrajectoryRow, TurnRow
from headrace_console.read_model.tables import HOUR_MS
from headrace_schemas import Restored, TrainingOutcome, Undone
from headrace_schemas.rules.turn_standing import (
    LineageOutcomes,
    RevisionOutcome,
    TurnFacts,
    TurnStanding,
    turn_standings,
)

_OUTCOME, _UNDONE, _RESTORED = range(3)
_HISTORY_MAX = 256
_REVISIONS_KEPT = 32


class CountKey(NamedTuple):
    """Key of a row of `counts`."""

    tenant: int
    model: int
    lineage: int
    hour: int
    standing: int


@dataclass(frozen=True, slots=True)
class TurnState:
    """A captured turn as the account sees it: its own event, completed by the trajectory that has it."""

    turn: TurnRow
    model: int
    facts: TurnFacts
    no_logprobs: str | None


def standing_name(standing: TurnStanding) -> str:
    """Return the name of a standing and its detail, such as `dropped/stale`."""
    return "/".join(standing)


def split_standing(name: str) -> TurnStanding:
    """Return the standing and the detail that `standing_name` has joined."""
    standing, _, detail = name.partition("/")
    return standing, detail


def state_of(turn: TurnRow, trajectories: Iterable[TrajectoryRow], names: Names) -> TurnState | None:
    """Return the state of a turn, or None if it is not captured.

    Args:
        turn: the turn.
        trajectories: the published trajectories that contain the turn. An accepted one has precedence.
        names: the texts of the rows.
    """
    claim = min(trajectories, key=lambda row: (row.refused, row.id), default=None)
    untrained, model = turn.untrained, turn.model
    no_logprobs = None if turn.no_logprobs is None else names.text(turn.no_logprobs)
    captures = claim is not None and (claim.ingested or (claim.refused and not turn.captured))
    if not (turn.captured or captures):
        return None
    left_out = None
    if claim is not None:
        untrained = untrained or claim.untrained
        left_out = _reason(claim.left_out, turn.id, names)
        if captures:
            model, no_logprobs = claim.model, _reason(claim.no_logprobs, turn.id, names)
    facts = TurnFacts(
        eval=turn.eval or (claim is not None and claim.eval),
        untrained=None if untrained is None else names.text(untrained),
        left_out=left_out,
        in_trajectory=claim is not None,
        refused=turn.refused if claim is None else claim.refused,
    )
    return TurnState(turn, model, facts, no_logprobs)


def _reason(reasons: str | None, turn: int, names: Names) -> str | None:
    number = json.loads(reasons).get(str(turn)) if reasons else None
    return None if number is None else names.text(number)


def standing_of(state: TurnState, experiences: Sequence[ExperienceRow], lineage: int, names: Names) -> TurnStanding:
    """Return the standing of a turn in a lineage; 0 stands for no lineage."""
    turn_id = unpack_id(state.turn.name)
    in_training = [
        outcomes_of(row, lineage, names).standing(turn_id, row.revision, state.no_logprobs, refused=row.refused)
        for row in sorted(experiences, key=lambda row: unpack_id(row.name))
    ]
    return turn_standings(state.facts, in_training)[0]


def count_changes(state: TurnState, experiences: Sequence[ExperienceRow], names: Names) -> Counter[CountKey]:
    """Return what a turn adds to the counts."""
    hour = state.turn.at_ms // HOUR_MS
    untrained = names.number(standing_name(standing_of(state, experiences, 0, names)))
    changes = Counter({CountKey(state.turn.tenant, state.model, 0, hour, untrained): 1})
    for lineage in {lineage for row in experiences for lineage in lineages_of(row)}:
        standing = names.number(standing_name(standing_of(state, experiences, lineage, names)))
        changes[CountKey(state.turn.tenant, state.model, lineage, hour, standing)] += 1
        changes[CountKey(state.turn.tenant, state.model, lineage, hour, untrained)] -= 1
    return changes


def _history(row: ExperienceRow) -> list[list[object]]:
    entries: list[list[object]] = json.loads(row.history) if row.history else []
    return entries


class HistoryEntry(NamedTuple):
    """One outcome of a revision, or its reversal, in the order of the lineage's saves."""

    lineage: int
    save: int
    revision: int
    kind: str
    """`trained`, `dropped`, `undone`, `queued again` or `restored`."""
    reason: int
    """Number of the reason of a drop, or 0."""


def history_of(history: str | None) -> list[HistoryEntry]:
    """Return the outcomes of an experience from the column `history`."""
    entries = []
    for lineage, save, kind, revision, *rest in sorted(json.loads(history or "[]"), key=lambda entry: entry[:3]):
        if kind == _OUTCOME:
            name, reason = ("trained", 0) if rest[0] is None else ("dropped", rest[1])
        else:
            name, reason = "restored" if kind == _RESTORED else "queued again" if rest[0] else "undone", 0
        entries.append(HistoryEntry(lineage, save, revision, name, reason))
    return entries


def lineages_of(row: ExperienceRow) -> set[int]:
    """Return the lineages that have reported on an experience."""
    return {int(str(entry[0])) for entry in _history(row)}


def outcomes_of(row: ExperienceRow, lineage: int, names: Names) -> LineageOutcomes:
    """Return what a lineage has made of the revisions of an experience."""
    outcomes = LineageOutcomes()
    if row.history is None or not lineage:
        return outcomes
    for _, _, kind, revision, *rest in sorted(
        (entry for entry in json.loads(row.history) if entry[0] == lineage), key=lambda entry: (entry[1], entry[2])
    ):
        if kind == _OUTCOME:
            dropped, reason, left_out = rest
            dropped, reason = (None if number is None else names.text(number) for number in (dropped, reason))
            outcomes.add(revision, RevisionOutcome(dropped, reason, frozenset(left_out)))
        elif kind == _UNDONE:
            outcomes.undo(Undone(experience_id="-", revision=revision, queued=bool(rest[0])))
        else:
            outcomes.restore(Restored(experience_id="-", revision=revision))
    return outcomes


def add_outcome(
    row: ExperienceRow, save: tuple[int, int], item: TrainingOutcome | Undone | Restored, names: Names
) -> None:
    """Add an outcome to the history of an experience.

    Args:
        row: the experience.
        save: the lineage and the number of its save.
        item: the outcome, or its reversal.
        names: the texts of the rows.
    """
    entry: list[object]
    if isinstance(item, TrainingOutcome):
        texts = [None if text is None else names.number(text) for text in (item.dropped, item.reason)]
        entry = [*save, _OUTCOME, item.revision, *texts, list(item.left_out)]
    elif isinstance(item, Undone):
        entry = [*save, _UNDONE, item.revision, int(item.queued)]
    else:
        entry = [*save, _RESTORED, item.revision]
    entries = [*_history(row), entry]
    if len(entries) > _HISTORY_MAX:
        entries = _without_superseded_drops(entries, row.revision)
    row.history = json.dumps(entries, separators=(",", ":"))


def _without_superseded_drops(entries: list[list[object]], newest: int) -> list[list[object]]:
    """Return the entries without drops of old revisions that were never undone: no standing depends on these."""
    reverted = {(entry[0], entry[3]) for entry in entries if entry[2] != _OUTCOME}
    return [
        entry
        for entry in entries
        if entry[2] != _OUTCOME
        or entry[4] is None
        or (entry[0], entry[3]) in reverted
        or int(str(entry[3])) > newest - _REVISIONS_KEPT
    ]
