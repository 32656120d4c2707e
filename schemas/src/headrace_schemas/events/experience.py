"""`experiences`: a branch with its total reward, ready to train."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.base import Event, Finite, Model, ModelName, SessionKey, Text
from headrace_schemas.events.trajectory import Branch
from headrace_schemas.ids import derived_id

NoReward = Literal["no_reward", "required_source_missing", "withdrawn"]


class RewardPart(Model):
    """One source's share in the total."""

    source: Text
    value: Finite
    weight: Finite


class Experience(Event):
    """One branch of one trajectory with its present reward.

    `experience_id` names the branch; `revision` counts the changes of its reward, and the highest one is valid.
    `reward` is None when the branch must not be trained (any more), and `no_reward` says why. The trainer counts these,
    too, so that every captured turn ends as trained, waiting or dropped.
    """

    topic: ClassVar[str] = "experiences"
    type: ClassVar[str] = "headrace.experience.v1"

    experience_id: Text
    revision: Annotated[int, Field(ge=0)] = 0
    trajectory_id: Text
    session_key: SessionKey
    session_id: Text
    tenant: Text = "default"
    task_id: Text | None = None
    """Names the group: experiences of one task are compared with each other."""
    run_id: Text | None = None
    model: ModelName
    branch_index: Annotated[int, Field(ge=0)] = 0
    branch: Branch | None = None
    turn_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    """The turns of the branch. Turns that were left out of all branches are in no experience."""
    weight: Annotated[Finite, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the run: the branches of one run add up to 1."""
    reward: Finite | None = None
    no_reward: NoReward | None = None
    parts: tuple[RewardPart, ...] = Field(default=(), max_length=64)

    @model_validator(mode="after")
    def _trainable_or_not(self) -> Self:
        if (self.reward is None) == (self.no_reward is None):
            raise ValueError("exactly one of reward and no_reward must be set")
        if self.reward is not None and self.branch is None:
            raise ValueError("an experience with a reward needs its branch")
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
