"""Reads what the model answered. Strict: an answer in any other form is unreadable (P6)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_judge.rubric import SCALE_MAX, SCALE_MIN, Rubric
from headrace_schemas.text import storable

REASON_CHARS_MAX = 4_000
_ANSWER_CHARS_MAX = 65_536
_OBJECTS_MAX = 64
_PROBLEMS_MAX = 5
_PREFERENCES: dict[str, int] = {"A": 1, "tie": 0, "B": -1}


class Unreadable(Exception):
    """The answer is not a verdict. The message is for the model, which may be asked to repair it. Never logged."""


class Verdict(BaseModel):
    """What one answer says: a number per criterion, or None where the model abstains.

    Numbers are scores on the scale in mode `single`; in mode `pair` 1 prefers the run shown as A, -1 the one shown as
    B, 0 neither.
    """

    model_config = ConfigDict(frozen=True)

    criteria: dict[str, int] | None
    reason: str


Score = Annotated[int, Field(ge=SCALE_MIN, le=SCALE_MAX)]
Preference = Literal["A", "B", "tie"]
V = TypeVar("V")


class _Answer(BaseModel, Generic[V]):
    model_config = ConfigDict(extra="forbid", strict=True)

    abstain: bool = False
    reason: str
    criteria: dict[str, V] | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.abstain == bool(self.criteria):
            raise ValueError("give either criteria, or abstain = true with a reason")
        return self


Reader = Callable[[str], Verdict]
"""Turns an answer's text into a verdict or raises `Unreadable`."""


def reader(rubric: Rubric) -> Reader:
    """Reads answers to prompts of `rubric`; its criteria must all be there and no others."""
    names = [criterion.name for criterion in rubric.criteria]

    def read(text: str) -> Verdict:
        data = _object(text)
        if rubric.mode == "single":
            scores = _validate(_Answer[Score], data)
            return _verdict(names, scores.criteria, scores.reason)
        votes = _validate(_Answer[Preference], data)
        if votes.criteria is None:
            return _verdict(names, None, votes.reason)
        return _verdict(names, {name: _PREFERENCES[vote] for name, vote in votes.criteria.items()}, votes.reason)

    return read


def _verdict(names: list[str], numbers: dict[str, int] | None, reason: str) -> Verdict:
    if numbers is not None and set(numbers) != set(names):
        missing = [name for name in names if name not in numbers]
        unknown = [name for name in numbers if name not in names]
        raise Unreadable(f"criteria must be exactly {names}; missing: {missing}, unknown: {unknown[:_PROBLEMS_MAX]}")
    return Verdict(criteria=numbers, reason=shorten(reason))


def shorten(reason: str) -> str:
    """Return the reason as a database can store it, cut to a bounded length, with the number of characters cut."""
    reason = storable(reason)
    surplus = len(reason) - REASON_CHARS_MAX
    return reason if surplus <= 0 else f"{reason[:REASON_CHARS_MAX]} [... {surplus} characters left out]"


def _validate(model: type[_Answer[V]], data: dict[str, object]) -> _Answer[V]:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)[:_PROBLEMS_MAX]
        listed = (f"{'.'.join(map(str, item['loc'])) or 'the object'}: {item['msg']}" for item in problems)
        raise Unreadable("; ".join(listed)) from None


def _object(text: str) -> dict[str, object]:
    """The one JSON object in `text` that looks like a verdict: bare, in a fence, or with prose around it.

    Two different objects are refused, because one may be quoted from the run; so is an object with a repeated name.
    """
    if len(text) > _ANSWER_CHARS_MAX:
        raise Unreadable(f"the answer has {len(text)} characters; at most {_ANSWER_CHARS_MAX} are read")
    found = [item for item in _objects(text) if {"criteria", "abstain"} & set(item)]
    if not found:
        raise Unreadable('there is no JSON object with "criteria" or "abstain" in it')
    if any(item != found[0] for item in found):
        raise Unreadable(f"there are {len(found)} JSON objects that differ; give one")
    return found[0]


def _objects(text: str) -> list[dict[str, object]]:
    """JSON objects that lie in `text` one after the other, outermost ones only."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    found: list[dict[str, object]] = []
    start = text.find("{")
    for _ in range(_OBJECTS_MAX):
        if start < 0:
            return found
        try:
            item, end = decoder.raw_decode(text, start)
            found.append(item)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    raise Unreadable("there are too many braces in the answer to find the JSON object")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError("a name is given twice")
    return items


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
