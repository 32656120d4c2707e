"""Events of `experiences`: branches with their total rewards, ready to be trained."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.events.chat import Message
from headrace_schemas.events.trajectory import Branch
from headrace_schemas.values.base import Event, Finite, Model, ModelName, SessionKey, Text
from headrace_schemas.values.bounds import INT32, Total
from headrace_schemas.values.ids import derived_id

NoReward = Literal["no_reward", "required_source_missing", "withdrawn"]


class RewardPart(Model):
    """The contribution of one source to the total reward."""

    source: Text
    value: Total
    weight: Total


class TurnReward(Model):
    """The reward of one turn of the branch, in addition to the reward of the run."""

    turn_id: Text
    value: Total


class Edit(Model):
    """The correct answer of a turn. It follows the same prompt as the answer that it replaces."""

    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    source: Text = "feedback"
    message: Message
    """The assistant message with text, tool calls or both."""


class PreferenceSide(Model):
    """One of the two answers of a preference.

    The other answer has the same `preference_id`. It is in this experience or in another one, also of another session.
    """

    preference_id: Text
    side: Literal["chosen", "rejected"]
    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    source: Text = "feedback"


class Experience(Event):
    """One branch of one trajectory with its present reward, and the turn rewards, edits and preferences of its turns.

    `experience_id` identifies the branch. `revision` counts the changes of its reward, and the highest one is valid.
    `reward` is None if the branch must not be trained (any more); `no_reward` is the reason. The trainer counts these
    experiences, too, so that every captured turn is reported as trained, waiting or dropped.
    """

    topic: ClassVar[str] = "experiences"
    type: ClassVar[str] = "headrace.experience.v1"
    sampled_text: ClassVar[bool] = True

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32] = 0
    trajectory_id: Text
    session_key: SessionKey
    session_id: Text
    tenant: Text = "default"
    task_id: Text | None = None
    """The group of the experience. Experiences of one task are compared with each other."""
    run_id: Text | None = None
    model: ModelName
    branch_index: Annotated[int, Field(ge=0), INT32] = 0
    branch: Branch | None = None
    turn_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    """The turns of the branch. A turn that was left out of all branches is in no experience."""
    weight: Annotated[Finite, Field(gt=0.0, le=1.0)] = 1.0
    """The branch's share of its run. The weights of a run's branches with logprobs add up to 1; a branch without any
    has the share that it would have among all branches."""
    reward: Total | None = None
    no_reward: NoReward | None = None
    parts: tuple[RewardPart, ...] = Field(default=(), max_length=64)
    parts_left_out: tuple[Text, ...] = Field(default=(), max_length=64)
    """Sources whose scores do not count in `reward` because `parts` is full: the first 64 by name."""
    turn_rewards: tuple[TurnReward, ...] = Field(default=(), max_length=4096)
    edits: tuple[Edit, ...] = Field(default=(), max_length=256)
    """If there are edits or preferences, `branch` is set even without a reward."""
    preferences: tuple[PreferenceSide, ...] = Field(default=(), max_length=256)
    origin: Literal["sampled", "written"] = "sampled"
    """`written` if no version sampled the tokens of the spans, because they come from a person or a data set. Then
    their logprobs are 0 and have no meaning, their version is the first one of the lineage, and only algorithms that
    need neither train them."""

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
        """Return the `experience_id` of a branch."""
        return derived_id("experience", trajectory_id, branch_index)

    @staticmethod
    def event_id_of(experience_id: str, revision: int) -> str:
        """Return the `event_id` of a revision of an experience."""
        return derived_id("experience-revision", experience_id, revision)

    @property
    def event_id(self) -> str:
        return self.event_id_of(self.experience_id, self.revision)

    @property
    def key(self) -> str:
        return self.session_key

    @property
    def subject(self) -> str:
        return self.experience_id
