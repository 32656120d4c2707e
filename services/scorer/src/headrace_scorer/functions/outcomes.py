"""Outcomes of calls of reward functions, and the messages over pipes that carry calls and outcomes.

An outcome is made from a return value or an exception. None and failures never count as a reward of 0.
"""

from __future__ import annotations

import math
import struct
import traceback
from collections.abc import Mapping
from typing import BinaryIO, Literal

from pydantic import BaseModel, JsonValue, ValidationError

from headrace_schemas import RewardResult
from headrace_schemas.values.text import describe_error, plain_number, storable
from headrace_scorer.functions.loading import RewardFunction

_REASON_LENGTH_MAX = 4000
LENGTH = struct.Struct(">I")


class Outcome(BaseModel):
    """The result of one call of a reward function for one trajectory, as its process sends it to the scorer."""

    outcome: Literal["scored", "abstained", "failed", "timed_out"]
    value: float | None = None
    criteria: dict[str, float] = {}
    turns: dict[str, float] = {}
    """Values of single turns, whether or not the run has a value."""
    reason: str | None = None
    judged_by: str | None = None
    """Digest of the function's source, set by the scorer."""

    @classmethod
    def failed(cls, reason: str) -> Outcome:
        """Return a failed outcome with this reason, shortened if necessary."""
        return cls(outcome="failed", reason=storable(reason[:_REASON_LENGTH_MAX]))


def outcome_of(returned: object) -> Outcome:
    """Convert the return value of a reward function to an outcome.

    A number is a score, and None abstains. A dict of criteria is a score by its `value`, or else by the mean of the
    criteria.
    """
    try:
        result = _result(returned)
    except Exception as error:  # noqa: BLE001 (conversions run the user's code: `item`, `__float__`, `items`)
        return Outcome.failed(_conversion_error(error))
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


def _conversion_error(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(item["msg"] for item in error.errors(include_url=False, include_input=False)[:3])
    return describe_error(error).partition(": ")[2]


def outcome_of_error(error: BaseException) -> Outcome:
    """Convert an exception of a reward function to a failed outcome, with the innermost line of the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Outcome.failed(f"{describe_error(error)}{where}")


def _short(reason: str | None) -> str | None:
    return storable(reason[:_REASON_LENGTH_MAX]) if reason else None


class LoadRequest(BaseModel):
    """First message to a function process: the functions to load.

    `sources` has the text of files that were loaded before.
    """

    specs: tuple[str, ...]
    sources: dict[str, str] = {}
    memory_mb: int | None = None


class LoadResponse(BaseModel):
    """Answer of a function process to a `LoadRequest`.

    If `error` is set, no function is loaded and the process ends.
    """

    functions: tuple[RewardFunction, ...] = ()
    sources: dict[str, str] = {}
    uncovered: tuple[str, ...] = ()
    """Files of the user that the modules read and no digest covers."""
    error: str | None = None


class CallRequest(BaseModel):
    """Request to call one function. The next message is the trajectory as JSON."""

    kind: Literal["call"] = "call"
    function: str
    feedback: tuple[str, ...] = ()
    """Feedback events as JSON."""
    context: dict[str, JsonValue] = {}


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message to a pipe, preceded by its length."""
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """Read the next message from a pipe. Raises `EOFError` when the other side has closed it."""
    return _read_exactly(stream, LENGTH.unpack(_read_exactly(stream, LENGTH.size))[0])


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other side has closed the pipe")
    return data
