"""What was said of the answers of a branch besides their reward: edits, preferences, rewards of single turns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from headrace_schemas import Branch, Edit, Message, PreferenceSide, TurnReward
from headrace_schemas.events.reward import Outcome
from headrace_scorer.feedback_entries import ANY_CHOICE, Answer, EntryKey
from headrace_scorer.reward_policy import RewardPolicy, SourceReward

Given = Mapping[EntryKey, str]
"""The edits and preferences that stand: the message as JSON, the side."""


@dataclass(frozen=True, slots=True)
class AnswerRemarks:
    """Of one branch, in the order of its turns."""

    turn_rewards: tuple[TurnReward, ...] = ()
    edits: tuple[Edit, ...] = ()
    preferences: tuple[PreferenceSide, ...] = ()

    @property
    def need_the_branch(self) -> bool:
        """Whether there is something to train on without a reward."""
        return bool(self.edits or self.preferences)


def about(rewards: Sequence[SourceReward], branch: Branch) -> list[SourceReward]:
    """The rewards that are about the branch: a reward of one choice is about the branch that continues it."""
    answers = answers_of(branch)
    return [one for one in rewards if one.choice is None or (one.turn_id or "", one.choice) in answers]


def answers_of(branch: Branch) -> dict[Answer, int]:
    """Each answer that the model gave in the branch, with its place among them."""
    return {(span.turn_id, span.choice): place for place, span in enumerate(branch.spans)}


def remarks(branch: Branch, rewards: Sequence[SourceReward], given: Given, policy: RewardPolicy) -> AnswerRemarks:
    """`rewards` are those about the branch, `given` may be about other branches, too."""
    answers = answers_of(branch)
    own = sorted(
        ((key, detail) for key, detail in given.items() if (key.turn_id, key.choice) in answers),
        key=lambda item: (answers[item[0].turn_id, item[0].choice], item[0].source, item[0].subject),
    )
    turns = ((turn_id, policy.turn_reward(rewards, turn_id)) for turn_id in branch.turn_ids)
    return AnswerRemarks(
        tuple(TurnReward(turn_id=turn_id, value=value) for turn_id, value in turns if value is not None),
        tuple(_edit(key, detail) for key, detail in own if key.kind == "edit"),
        tuple(_side(key, detail) for key, detail in own if key.kind == "preference"),
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
    """A row of the ledger that is a reward, as the policy reads it."""
    choice = None if key.choice == ANY_CHOICE else key.choice
    return SourceReward(key.source, key.turn_id or None, cast(Outcome, outcome), value, choice)
