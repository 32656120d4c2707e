"""Ledger entries of the feedback about one trajectory, and the edits, preferences and turn rewards of its answers.

Pure; only log offsets order feedback.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from headrace_schemas import Branch, Edit, Feedback, Message, PreferenceSide, TurnReward
from headrace_schemas.events.feedback import Outcome
from headrace_schemas.events.opinion import values_of
from headrace_schemas.values.ids import derived_id, matches_any
from headrace_scorer.feedback_matching import FeedbackSet
from headrace_scorer.reward_policy import RewardPolicy, SourceReward

ANY_CHOICE = -1
"""Choice in the key of an entry that is about a turn or a trajectory, and not about one answer."""

_REASON_LENGTH_MAX = 1000
"""Largest number of characters of a comment in the reason of an entry. The feedback itself has the whole comment."""

EntryKind = Literal["reward", "edit", "preference"]
EntryOutcome = Literal["scored", "abstained", "withdrawn", "given"]
Answer = tuple[str, int]
"""A turn id and the index of one of its choices. Each span of a branch holds one answer."""


class EntryKey(NamedTuple):
    """Key of a ledger entry. A later revision of a key replaces the earlier ones."""

    kind: EntryKind
    turn_id: str
    """Empty for an entry about the whole trajectory."""
    choice: int
    subject: str
    """The rater of an edit, or the id of a preference. Empty for a reward, which combines all raters of its source."""
    source: str

    @classmethod
    def reward(cls, source: str, turn_id: str = "", choice: int = ANY_CHOICE) -> EntryKey:
        """Return the key of a source's reward for an answer, for a turn or, without a turn, for the whole
        trajectory.
        """
        return cls("reward", turn_id, choice, "", source)


@dataclass(frozen=True, slots=True)
class FeedbackEntry:
    """One row for the ledger of rewards, computed from all feedback of one source about the same object.

    `origin` identifies these feedback events, so that the same events do not add a second revision.
    """

    outcome: EntryOutcome
    origin: str
    value: float | None = None
    detail: str | None = None
    """The message of an edit as JSON, or the side of a preference."""
    reason: str | None = None


class _RaterValue(NamedTuple):
    """The latest value of one rater. `value` is None if it was withdrawn, or if its label has no value."""

    feedback: Feedback
    value: float | None


def entries_of(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float], corrections_max: int
) -> dict[EntryKey, FeedbackEntry]:
    """Compute the ledger entries from all feedback about a trajectory.

    Args:
        answers: answers in the branches of the trajectory.
        labels: value of each label that feedback may use.
        corrections_max: largest number of edits, and of preferences, that count. The newest count; older ones are
            withdrawn.
    """
    return {
        **_rewards(feedback_set, answers, labels),
        **_edits(feedback_set, answers, corrections_max),
        **_preferences(feedback_set, answers, corrections_max),
    }


def thumbs_of(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float], teachers: Collection[str]
) -> dict[str, float]:
    """Return the value that each rater of the sources `teachers` gives to the run, as training data of a reward model.

    It is the mean of the rater's values for the whole run, or else the mean over the turns. All raters without a name
    count as one rater with an empty name.
    """
    for_run: dict[str, list[float]] = {}
    for_turns: dict[str, list[float]] = {}
    for key, latest in _latest_values(feedback_set, answers, labels).items():
        if matches_any(teachers, key.source):
            for rater, rated in latest.items():
                if rated.value is not None:
                    (for_turns if key.turn_id else for_run).setdefault(rater, []).append(rated.value)
    return {rater: math.fsum(values) / len(values) for rater, values in (for_turns | for_run).items()}


def _rewards(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float]
) -> dict[EntryKey, FeedbackEntry]:
    latest_values = _latest_values(feedback_set, answers, labels)
    return {key: _combine_raters(list(latest.values())) for key, latest in latest_values.items()}


def _latest_values(
    feedback_set: FeedbackSet, answers: Collection[Answer], labels: Mapping[str, float]
) -> dict[EntryKey, dict[str, _RaterValue]]:
    """Return the latest value of each rater by ledger key. Raters are in the order of their values in the log."""
    latest_values: dict[EntryKey, dict[str, _RaterValue]] = defaultdict(dict)
    for event in feedback_set.all:
        if event.feedback_kind != "value":
            continue
        targets = list(_targets(event, answers))
        for source, value in values_of(event, labels):
            for turn_id, choice in targets:
                latest = latest_values[EntryKey.reward(source, turn_id, choice)]
                latest.pop(event.rater or "", None)  # insertion order is the order of the log
                latest[event.rater or ""] = _RaterValue(event, value)
    return latest_values


def _targets(event: Feedback, answers: Collection[Answer]) -> Iterator[Answer]:
    """Yield the turn id and the choice of each object that feedback is about; an empty turn id means the trajectory.

    Feedback without a level that lists some of the turns in branches is about those turns. Feedback without a level
    that lists all of them, or none, is about the whole trajectory.
    """
    turns = {turn for turn, _ in answers}
    if event.level == "response":
        if (event.msg_ids[0], event.choice or 0) in answers:
            yield event.msg_ids[0], event.choice or 0
    elif event.level == "turn" or (event.level is None and event.msg_ids and not turns <= set(event.msg_ids)):
        yield from ((turn, ANY_CHOICE) for turn in sorted(turns.intersection(event.msg_ids)))
    else:
        yield "", ANY_CHOICE


def _combine_raters(rated: Sequence[_RaterValue]) -> FeedbackEntry:
    """Combine the raters of a source into one entry: the mean of their values, or a withdrawal if none remains.

    Args:
        rated: latest value of each rater, in the order of the log.
    """
    active = [item for item in rated if not item.feedback.withdrawn]
    if not active:
        last = rated[-1].feedback
        return FeedbackEntry("withdrawn", last.event_id, reason=_reason(last))
    ids = sorted(item.feedback.event_id for item in active)
    origin = ids[0] if len(ids) == 1 else derived_id("raters", *ids)
    values = [item.value for item in active if item.value is not None]
    if not values:
        reason = f"the label {active[-1].feedback.label!r} has no value in scorer.labels"
        return FeedbackEntry("abstained", origin, reason=reason)
    commented = next((item.feedback for item in reversed(active) if item.feedback.comment), active[-1].feedback)
    return FeedbackEntry("scored", origin, math.fsum(values) / len(values), reason=_reason(commented))


def _edits(feedback_set: FeedbackSet, answers: Collection[Answer], most: int) -> dict[EntryKey, FeedbackEntry]:
    latest: dict[EntryKey, Feedback] = {}
    for event in feedback_set.all:
        if event.feedback_kind == "edit" and event.answer in answers:
            key = EntryKey("edit", *event.answer, event.rater or "", event.source)
            latest.pop(key, None)
            latest[key] = event
    counted = {key for key, _ in [item for item in latest.items() if not item[1].withdrawn][-most:]}
    return {
        key: FeedbackEntry("given", event.event_id, detail=_edited_message(event), reason=_reason(event))
        if key in counted
        else _withdrawn_entry(event)
        for key, event in latest.items()
    }


def _preferences(feedback_set: FeedbackSet, answers: Collection[Answer], most: int) -> dict[EntryKey, FeedbackEntry]:
    latest: dict[str, Feedback] = {}
    for event in feedback_set.all:
        pair = () if event.preference is None else event.preference.pair
        if any((side.turn_id, side.choice) in answers for side in pair):
            preference_id = event.preference_id(event.tenant)
            latest.pop(preference_id, None)
            latest[preference_id] = event
    counted = {name for name, _ in [item for item in latest.items() if not item[1].withdrawn][-most:]}
    entries = {}
    for preference_id, event in latest.items():
        assert event.preference is not None
        for side, compared in (("chosen", event.preference.chosen), ("rejected", event.preference.rejected)):
            answer = compared.turn_id, compared.choice
            if answer in answers:
                counting = FeedbackEntry("given", event.event_id, detail=side, reason=_reason(event))
                entry = counting if preference_id in counted else _withdrawn_entry(event)
                entries[EntryKey("preference", *answer, preference_id, event.metric_source)] = entry
    return entries


def _reason(event: Feedback) -> str | None:
    """Return the comment of feedback, cut to a bound, because one feedback event may give thousands of entries."""
    comment = event.comment
    if comment is None or len(comment) <= _REASON_LENGTH_MAX:
        return comment
    return f"{comment[:_REASON_LENGTH_MAX]}... ({len(comment) - _REASON_LENGTH_MAX} more characters)"


def _withdrawn_entry(event: Feedback) -> FeedbackEntry:
    too_many = "there are more of them than count, and this one is among the oldest"
    return FeedbackEntry("withdrawn", event.event_id, reason=_reason(event) if event.withdrawn else too_many)


def _edited_message(event: Feedback) -> str:
    assert event.edit is not None
    return event.edit.model_dump_json(exclude_none=True)


Corrections = Mapping[EntryKey, str]
"""Edits and preferences that are not withdrawn: each edit's message as JSON, each preference's side."""


@dataclass(frozen=True, slots=True)
class AnswerRemarks:
    """Turn rewards, edits and preferences for the answers of one branch, in the order of its turns."""

    turn_rewards: tuple[TurnReward, ...] = ()
    edits: tuple[Edit, ...] = ()
    preferences: tuple[PreferenceSide, ...] = ()

    @property
    def are_trainable_without_reward(self) -> bool:
        """Whether edits or preferences can train the branch without a reward."""
        return bool(self.edits or self.preferences)


def rewards_about_branch(rewards: Sequence[SourceReward], branch: Branch) -> list[SourceReward]:
    """Return the rewards that apply to a branch. A reward of one choice applies to the branches that contain it."""
    answers = answers_of(branch)
    return [reward for reward in rewards if reward.choice is None or (reward.turn_id or "", reward.choice) in answers]


def answers_of(branch: Branch) -> dict[Answer, int]:
    """Return the position in the branch of each answer of the model."""
    return {(span.turn_id, span.choice): position for position, span in enumerate(branch.spans)}


def branch_remarks(
    branch: Branch, rewards: Sequence[SourceReward], corrections: Corrections, policy: RewardPolicy
) -> AnswerRemarks:
    """Collect the feedback about the single answers of a branch: turn rewards, edits and preferences.

    Args:
        rewards: rewards that apply to the branch.
        corrections: valid edits and preferences of the trajectory, of which those about other branches are ignored.
    """
    answers = answers_of(branch)
    matching = sorted(
        ((key, detail) for key, detail in corrections.items() if (key.turn_id, key.choice) in answers),
        key=lambda item: (answers[item[0].turn_id, item[0].choice], item[0].source, item[0].subject),
    )
    turns = ((turn_id, policy.turn_reward(rewards, turn_id)) for turn_id in branch.turn_ids)
    return AnswerRemarks(
        tuple(TurnReward(turn_id=turn_id, value=value) for turn_id, value in turns if value is not None),
        tuple(_edit(key, detail) for key, detail in matching if key.kind == "edit"),
        tuple(_side(key, detail) for key, detail in matching if key.kind == "preference"),
    )


def _edit(key: EntryKey, detail: str) -> Edit:
    message = Message.model_validate_json(detail)
    return Edit(turn_id=key.turn_id, choice=key.choice, source=key.source, message=message)


def _side(key: EntryKey, detail: str) -> PreferenceSide:
    side = cast(Literal["chosen", "rejected"], detail)
    return PreferenceSide(
        preference_id=key.subject, side=side, turn_id=key.turn_id, choice=key.choice, source=key.source
    )


def source_reward(key: EntryKey, outcome: str, value: float | None) -> SourceReward:
    """Convert an entry of the ledger to the reward that the reward policy reads."""
    choice = None if key.choice == ANY_CHOICE else key.choice
    return SourceReward(key.source, key.turn_id or None, cast(Outcome, outcome), value, choice)
