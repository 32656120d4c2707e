"""`rewards`: what one source says about a trajectory; it may be revised."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.base import Event, LongText, SessionKey, Text
from headrace_schemas.bounds import INT32, Score
from headrace_schemas.ids import derived_id

Outcome = Literal["scored", "abstained", "failed", "parse_error", "timed_out", "withdrawn"]


class Reward(Event):
    """The reward of one source. P6: `value` is set only if `outcome` is `scored`; no other outcome counts as 0.0.

    The highest `revision` per (`trajectory_id`, `turn_id`, `choice`, `source`) wins; earlier ones stay as history.
    """

    topic: ClassVar[str] = "rewards"
    type: ClassVar[str] = "headrace.reward.v1"
    values_max: ClassVar[int] = 1024

    trajectory_id: Text
    session_key: SessionKey
    tenant: Text = "default"
    turn_id: Text | None = None
    """Set when the reward is about one turn only."""
    choice: Annotated[int, Field(ge=0), INT32] | None = None
    """Set when it is about one of the answers of that turn."""
    source: Text
    """The source: `feedback`, `function:answer`, `judge:helpfulness`, or a name of your own."""
    revision: Annotated[int, Field(ge=0), INT32] = 0
    outcome: Outcome = "scored"
    value: Score | None = None
    criteria: dict[Text, Score] = Field(default_factory=dict, max_length=64)
    reason: LongText | None = None
    judged_by: Text | None = None
    """Model and prompt digest of a judge, or digest of the reward function's source."""

    @model_validator(mode="after")
    def _value_iff_scored(self) -> Self:
        if (self.value is None) == (self.outcome == "scored"):
            raise ValueError(f"outcome {self.outcome!r} with value {self.value!r}; exactly 'scored' has a value")
        if self.choice is not None and self.turn_id is None:
            raise ValueError("a choice is one of a turn; set turn_id")
        return self

    @property
    def event_id(self) -> str:
        choice = () if self.choice is None else (self.choice,)
        return derived_id("reward", self.trajectory_id, self.turn_id, self.source, self.revision, *choice)

    @property
    def key(self) -> str:
        return self.session_key

    @property
    def subject(self) -> str:
        return self.trajectory_id
