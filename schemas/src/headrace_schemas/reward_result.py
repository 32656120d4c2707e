"""What a reward function may return in place of a number."""

from __future__ import annotations

from pydantic import Field

from headrace_schemas.base import LongText, Model, Text
from headrace_schemas.bounds import Score


class RewardResult(Model):
    """A value with criteria and a reason. With `value` None the function abstains, which is not 0.0 (P6).

    With `value` left out and `criteria` given, the value is their mean.
    """

    value: Score | None = None
    criteria: dict[Text, Score] = Field(default_factory=dict, max_length=64)
    turns: dict[Text, Score] = Field(default_factory=dict, max_length=4096)
    """What single turns are worth by themselves, by turn id: process rewards. Turns in no branch are passed over."""
    reason: LongText | None = None
