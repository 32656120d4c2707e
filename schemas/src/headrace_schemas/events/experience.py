"""`experiences`: a branch with its total reward, ready to train."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.base import Event, Finite, Model, ModelName, SessionKey, Text
from headrace_schemas.bounds import INT32, Total
from headrace_schemas.events.chat import Message
from headrace_schemas.events.trajectory import Branch
from headrace_schemas.ids import derived_id

NoReward = Literal["no_reward", "required_source_missing", "withdrawn"]


class RewardPart(Model):
    """One source's share in the total."""

    source: Text
    value: Total
    weight: Total


class TurnReward(Model):
    """What one turn of the branch is worth by itself, beside the reward of the run."""

    turn_id: Text
    value: Total


class Edit(Model):
    """What a turn should have answered. It follows the same prompt as the answer that it replaces."""

    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    source: Text = "feedback"
    message: Message
    """An assistant's message: its text, its tool calls, or both."""


class PreferenceSide(Model):
    """One of the two answers that somebody compared. The other has the same `preference_id`, in this experience or in
    another one, whatever its session."""

    preference_id: Text
    side: Literal["chosen", "rejected"]
    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    source: Text = "feedback"


class Experience(Event):
    """One branch of one trajectory with its present reward, and with what else was said of its turns.

    `experience_id` names the branch; `revision` counts the changes of its reward, and the highest one is valid.
    `reward` is None when the branch must not be trained (any more), and `no_reward` says why. The trainer counts these,
    too, so that every captured turn ends as trained, waiting or dropped.
    """

    topic: ClassVar[str] = "experiences"
    type: ClassVar[str] = "headrace.experience.v1"

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32] = 0
    trajectory_id: Text
    session_key: SessionKey
    session_id: Text
    tenant: Text = "default"
    task_id: Text | None = None
    """Names the group: experiences of one task are compared with each other."""
    run_id: Text | None = None
    model: ModelName
    branch_index: Annotated[int, Field(ge=0), INT32] = 0
    branch: Branch | None = None
    turn_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    """The turns of the branch. Turns that were left out of all branches are in no experience."""
    weight: Annotated[Finite, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the run: the branches of one run add up to 1."""
    reward: Total | None = None
    no_reward: NoReward | None = None
    parts: tuple[RewardPart, ...] = Field(default=(), max_length=64)
    parts_left_out: tuple[Text, ...] = Field(default=(), max_length=64)
    """Sources that scored the branch and do not count in `reward`, because `parts` is full: the first 64 by name."""
    turn_rewards: tuple[TurnReward, ...] = Field(default=(), max_length=4096)
    edits: tuple[Edit, ...] = Field(default=(), max_length=256)
    """With one of these or of `preferences` the branch is there also where there is no reward."""
    preferences: tuple[PreferenceSide, ...] = Field(default=(), max_length=256)
    origin: Literal["sampled", "written"] = "sampled"
    """`written`: no version sampled the tokens of its spans; a person or a data set wrote them. Their logprobs are 0
    and say nothing, their version is the one that the lineage begins with, and only algorithms that need neither
    train them."""

    @model_validator(mode="after")
    def _trainable_or_not(self) -> Self:
        if (self.reward is None) == (self.no_reward is None):
            raise ValueError("exactly one of reward and no_reward must be set")
        if self.reward is not None and self.branch is None:
            raise ValueError("an experience with a reward needs its branch")
        if (self.edits or self.preferences) and self.branch is None:
            raise ValueError("an experience with an edit or a preference needs its branch")
        return self

    @staticmethod
    def id_of(trajectory_id: str, branch_index: int) -> str:
        return derived_id("experience", trajectory_id, branch_index)

    @property
    def event_id(self) -> str:
        return derived_id("experience-revision", self.experience_id, self.revision)

    @property
    def key(self) -> str:
        return self.session_key

    @property
    def subject(self) -> str:
        return self.experience_id
