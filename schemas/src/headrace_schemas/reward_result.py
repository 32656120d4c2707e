"""`RewardResult`, which a reward function may return in place of a number."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from headrace_schemas.base import LongText, Model, Text
from headrace_schemas.bounds import Score
from headrace_schemas.plain_values import plain_number


def _plain(value: object) -> object:
    """Return a number of any library as a float. Strings are left to pydantic, whose message names the field."""
    try:
        return plain_number(value)
    except TypeError as error:
        if isinstance(value, str):
            return value
        raise ValueError(str(error)) from None


PlainScore = Annotated[Score, BeforeValidator(_plain)]


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
