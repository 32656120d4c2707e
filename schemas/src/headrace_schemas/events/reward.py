"""Events of `rewards`: the rewards of single sources about trajectories, which may be revised.

`RewardResult` is the value that a reward function may return in place of a number.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from headrace_schemas.values.base import Event, LongText, Model, SessionKey, Text
from headrace_schemas.values.bounds import INT32, Score
from headrace_schemas.values.ids import derived_id
from headrace_schemas.values.plain_values import plain_number

Outcome = Literal["scored", "abstained", "failed", "parse_error", "timed_out", "withdrawn"]


class Reward(Event):
    """The reward of one source. `value` is set only if `outcome` is `scored`; no other outcome counts as 0.0 (P6).

    For each (`trajectory_id`, `turn_id`, `choice`, `source`) the highest `revision` is valid; earlier ones are history.
    """

    topic: ClassVar[str] = "rewards"
    type: ClassVar[str] = "headrace.reward.v1"
    values_max: ClassVar[int] = 1024

    trajectory_id: Text
    session_key: SessionKey
    tenant: Text = "default"
    turn_id: Text | None = None
    """The turn, if the reward is about a single turn."""
    choice: Annotated[int, Field(ge=0), INT32] | None = None
    """The index of the answer, if the reward is about a single answer of the turn."""
    source: Text
    """The source: `feedback`, `function:answer`, `judge:helpfulness`, or a name that you choose."""
    revision: Annotated[int, Field(ge=0), INT32] = 0
    outcome: Outcome = "scored"
    value: Score | None = None
    criteria: dict[Text, Score] = Field(default_factory=dict, max_length=64)
    reason: LongText | None = None
    judged_by: Text | None = None
    """Model and prompt digest of a judge, or digest of the source code of a reward function."""

    @model_validator(mode="after")
    def _value_iff_scored(self) -> Self:
        if (self.value is None) == (self.outcome == "scored"):
            raise ValueError(
                f"outcome {self.outcome!r} with value {self.value!r}: a value is required for 'scored' and not allowed "
                "for other outcomes"
            )
        if self.choice is not None and self.turn_id is None:
            raise ValueError("choice: is only allowed with turn_id; set turn_id")
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


def _to_float(value: object) -> object:
    """Return a number of any library as a float. Strings are left to pydantic, whose message names the field."""
    try:
        return plain_number(value)
    except TypeError as error:
        if isinstance(value, str):
            return value
        raise ValueError(str(error)) from None


PlainScore = Annotated[Score, BeforeValidator(_to_float)]


class RewardResult(Model):
    """Result of a reward function: a value with criteria and a reason.

    With `value` None the function abstains, which does not count as 0.0 (P6). If `value` is omitted and `criteria` are
    set, the value is their mean.
    """

    value: PlainScore | None = None
    criteria: dict[Text, PlainScore] = Field(default_factory=dict, max_length=64)
    turns: dict[Text, PlainScore] = Field(default_factory=dict, max_length=4096)
    """Process rewards by turn id. Turns that are in no branch are ignored."""
    reason: LongText | None = None
