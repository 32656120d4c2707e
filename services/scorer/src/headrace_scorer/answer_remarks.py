"""Edits, preferences and turn rewards of the answers of one branch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from headrace_schemas import Branch, Edit, Message, PreferenceSide, TurnReward
from headrace_schemas.events.reward import Outcome
from headrace_scorer.feedback_entries import ANY_CHOICE, Answer, EntryKey
from headrace_scorer.reward_policy import RewardPolicy, SourceReward

Corrections = Mapping[EntryKey, str]
"""Edits and preferences that are not withdrawn: each edit's message as JSON, each preference's side."""


@dataclass(frozen=True, slots=True)
class AnswerRemarks:
    """Turn rewards, edits and preference sides of one branch, in the order of its turns."""

    turn_rewards: tuple[TurnReward, ...] = ()
    edits: tuple[Edit, ...] = ()
    preferences: tuple[PreferenceSide, ...] = ()

    @property
    def need_the_branch(self) -> bool:
        """Whether the branch can be trained without a reward, by its edits or preferences."""
        return bool(self.edits or self.preferences)


def about(rewards: Sequence[SourceReward], branch: Branch) -> list[SourceReward]:
    """Return the rewards that apply to the branch. A reward of one choice applies to the branches that contain it."""
    answers = answers_of(branch)
    return [reward for reward in rewards if reward.choice is None or (reward.turn_id or "", reward.choice) in answers]


def answers_of(branch: Branch) -> dict[Answer, int]:
    """Return the position of each of the model's answers in the branch."""
    return {(span.turn_id, span.choice): position for position, span in enumerate(branch.spans)}


def remarks(
    branch: Branch, rewards: Sequence[SourceReward], corrections: Corrections, policy: RewardPolicy
) -> AnswerRemarks:
    """Return the turn rewards, edits and preference sides of the branch.

    Args:
        rewards: rewards that apply to the branch.
        corrections: edits and preferences of the trajectory; those of other branches are ignored.
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
    """Return a reward of the ledger in the form that the reward policy reads."""
    choice = None if key.choice == ANY_CHOICE else key.choice
    return SourceReward(key.source, key.turn_id or None, cast(Outcome, outcome), value, choice)
