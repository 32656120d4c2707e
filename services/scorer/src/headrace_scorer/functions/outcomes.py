"""What a reward function returned or raised, as an outcome. Nothing ever becomes 0.0 by accident (P6)."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ValidationError

from headrace_schemas import RewardResult
from headrace_schemas.plain_values import describe_error, plain_number
from headrace_schemas.text import storable

_REASON_LENGTH_MAX = 4000


class Outcome(BaseModel):
    """The result of one function for one trajectory, as its process sends it to the scorer."""

    outcome: Literal["scored", "abstained", "failed", "timed_out"]
    value: float | None = None
    criteria: dict[str, float] = {}
    turns: dict[str, float] = {}
    """What the function says of single turns, whether or not it scored the run."""
    reason: str | None = None
    judged_by: str | None = None
    """Digest of the function's source, set by the scorer."""

    @classmethod
    def failed(cls, reason: str) -> Outcome:
        return cls(outcome="failed", reason=storable(reason[:_REASON_LENGTH_MAX]))


def outcome_of(returned: object) -> Outcome:
    """A number scores; None abstains; a dict of criteria scores by its `value`, else by their mean."""
    try:
        result = _result(returned)
    except Exception as error:  # noqa: BLE001 (conversions run the user's code: `item`, `__float__`, `items`)
        return Outcome.failed(_complaint(error))
    value = result.value
    if value is None and result.criteria:
        value = sum(result.criteria.values()) / len(result.criteria)
    if value is not None and not math.isfinite(value):
        return Outcome.failed(f"the mean of its {len(result.criteria)} criteria is {value}; return smaller numbers")
    if value is None:
        return Outcome(outcome="abstained", turns=result.turns, reason=_short(result.reason))
    reason = _short(result.reason)
    return Outcome(outcome="scored", value=value, criteria=result.criteria, turns=result.turns, reason=reason)


def _result(returned: object) -> RewardResult:
    if returned is None or isinstance(returned, RewardResult):
        return returned or RewardResult()
    if isinstance(returned, Mapping):
        if not returned:
            raise TypeError("returned an empty dict; return None to abstain")
        if "value" in returned and returned["value"] is None:
            return RewardResult()
        named = {name: _number(value, f"returned {str(name)[:100]!r}") for name, value in returned.items()}
        return RewardResult(value=named.pop("value", None), criteria=named)
    return RewardResult(value=_number(returned, "returned"))


def _number(value: object, where: str) -> float:
    try:
        return plain_number(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}; or None, a dict of numbers, a RewardResult") from None


def _complaint(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(item["msg"] for item in error.errors(include_url=False, include_input=False)[:3])
    return describe_error(error).partition(": ")[2]


def raised(error: BaseException) -> Outcome:
    """Failed, with the exception and the innermost line of the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Outcome.failed(f"{describe_error(error)}{where}")


def _short(reason: str | None) -> str | None:
    return storable(reason[:_REASON_LENGTH_MAX]) if reason else None
