"""What the ledger should have of the feedback about one trajectory. Pure; the log alone orders it (P10)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headrace_schemas import Feedback
from headrace_schemas.events.opinion import values_of
from headrace_schemas.ids import derived_id
from headrace_schemas.source_patterns import fits_any
from headrace_scorer.feedback_matching import FeedbackSet

ANY_CHOICE = -1
"""The choice of what is about a turn whatever was answered, or about the whole trajectory."""

EntryKind = Literal["reward", "edit", "preference"]
EntryOutcome = Literal["scored", "abstained", "withdrawn", "given"]
Answer = tuple[str, int]
"""A turn and one of its choices: what a span of a branch holds."""


class EntryKey(NamedTuple):
    """What a row of the ledger is about. Its revisions replace each other."""

    kind: EntryKind
    turn_id: str
    """Empty: the whole trajectory."""
    choice: int
    subject: str
    """The rater of an edit, the id of a preference; a reward is its raters' together and has none."""
    source: str

    @classmethod
    def reward(cls, source: str, turn_id: str = "", choice: int = ANY_CHOICE) -> EntryKey:
        return cls("reward", turn_id, choice, "", source)


@dataclass(frozen=True, slots=True)
class FeedbackEntry:
    """What feedback amounts to for one key. `origin` names the feedback, so that equal words are entered once."""

    outcome: EntryOutcome
    origin: str
    value: float | None = None
    detail: str | None = None
    """The message of an edit as JSON, the side of a preference."""
    reason: str | None = None


class _Word(NamedTuple):
    """The last word of one rater. `value` None: withdrawn, or a label without a value."""

    feedback: Feedback
    value: float | None


def entries_of(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float], corrections_max: int
) -> dict[EntryKey, FeedbackEntry]:
    """The entry of each key that feedback is about. `answers` are those in the trajectory's branches.

    Of edits, and of preferences, the newest `corrections_max` count.
    """
    return {
        **_rewards(feedback_set, answers, labels),
        **_edits(feedback_set, answers, corrections_max),
        **_preferences(feedback_set, answers, corrections_max),
    }


def thumbs_of(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float], teachers: Collection[str]
) -> dict[str, float]:
    """What each rater of these sources says of the run: of the whole, else the mean over its turns. People without a
    name are one rater, whose name is empty."""
    found: dict[str, list[float]] = {}
    by_turn: dict[str, list[float]] = {}
    for key, words in _said(feedback_set, answers, labels).items():
        if fits_any(teachers, key.source):
            for rater, word in words.items():
                if word.value is not None:
                    (by_turn if key.turn_id else found).setdefault(rater, []).append(word.value)
    return {rater: math.fsum(values) / len(values) for rater, values in (by_turn | found).items()}


def _rewards(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float]
) -> dict[EntryKey, FeedbackEntry]:
    said = _said(feedback_set, answers, labels)
    return {key: _together(list(words.values())) for key, words in said.items()}


def _said(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float]
) -> dict[EntryKey, dict[str, _Word]]:
    """The last word of each rater about each thing, in the order of the log."""
    said: dict[EntryKey, dict[str, _Word]] = defaultdict(dict)
    for one in feedback_set.all:
        if one.about != "value":
            continue
        targets = list(_targets(one, answers))
        for source, value in values_of(one, labels):
            for turn_id, choice in targets:
                words = said[EntryKey.reward(source, turn_id, choice)]
                words.pop(one.rater or "", None)  # so that the words stand in the order of the log
                words[one.rater or ""] = _Word(one, value)
    return said


def _targets(one: Feedback, answers: Collection[Answer]) -> Iterator[Answer]:
    """The turns or answers that it is about; an empty turn is the whole trajectory.

    Without a level, what lists some of the turns in branches is about those, and what lists all of them, or none, is
    about the whole trajectory.
    """
    turns = {turn for turn, _ in answers}
    if one.level == "response":
        if (one.msg_ids[0], one.choice or 0) in answers:
            yield one.msg_ids[0], one.choice or 0
    elif one.level == "turn" or (one.level is None and one.msg_ids and not turns <= set(one.msg_ids)):
        yield from ((turn, ANY_CHOICE) for turn in sorted(turns.intersection(one.msg_ids)))
    else:
        yield "", ANY_CHOICE


def _together(words: Sequence[_Word]) -> FeedbackEntry:
    """The mean of the raters whose word stands; `words` are in the order of the log."""
    standing = [word for word in words if not word.feedback.withdrawn]
    if not standing:
        last = words[-1].feedback
        return FeedbackEntry("withdrawn", last.event_id, reason=last.comment)
    ids = sorted(word.feedback.event_id for word in standing)
    origin = ids[0] if len(ids) == 1 else derived_id("raters", *ids)
    values = [word.value for word in standing if word.value is not None]
    if not values:
        reason = f"the label {standing[-1].feedback.label!r} has no value in scorer.labels"
        return FeedbackEntry("abstained", origin, reason=reason)
    comment = next((word.feedback.comment for word in reversed(standing) if word.feedback.comment), None)
    return FeedbackEntry("scored", origin, math.fsum(values) / len(values), reason=comment)


def _edits(feedback_set: FeedbackSet, answers: Collection[Answer], most: int) -> dict[EntryKey, FeedbackEntry]:
    last: dict[EntryKey, Feedback] = {}
    for one in feedback_set.all:
        if one.about == "edit" and one.answer in answers:
            key = EntryKey("edit", *one.answer, one.rater or "", one.source)
            last.pop(key, None)
            last[key] = one
    counted = {key for key, one in [item for item in last.items() if not item[1].withdrawn][-most:]}
    return {
        key: FeedbackEntry("given", one.event_id, detail=_message(one), reason=one.comment)
        if key in counted
        else _taken_back(one)
        for key, one in last.items()
    }


def _preferences(feedback_set: FeedbackSet, answers: Collection[Answer], most: int) -> dict[EntryKey, FeedbackEntry]:
    last: dict[str, Feedback] = {}
    for one in feedback_set.all:
        if one.preference is not None and any((side.turn_id, side.choice) in answers for side in one.preference.pair):
            preference_id = one.preference_id(one.tenant)
            last.pop(preference_id, None)
            last[preference_id] = one
    counted = {name for name, one in [item for item in last.items() if not item[1].withdrawn][-most:]}
    found = {}
    for preference_id, one in last.items():
        assert one.preference is not None
        for side, compared in (("chosen", one.preference.chosen), ("rejected", one.preference.rejected)):
            answer = compared.turn_id, compared.choice
            if answer in answers:
                given = FeedbackEntry("given", one.event_id, detail=side, reason=one.comment)
                entry = given if preference_id in counted else _taken_back(one)
                found[EntryKey("preference", *answer, preference_id, one.metric_source)] = entry
    return found


def _taken_back(one: Feedback) -> FeedbackEntry:
    full = "there are newer ones than scorer.corrections_max counts"
    return FeedbackEntry("withdrawn", one.event_id, reason=one.comment if one.withdrawn else full)


def _message(one: Feedback) -> str:
    assert one.edit is not None
    return one.edit.model_dump_json(exclude_none=True)
