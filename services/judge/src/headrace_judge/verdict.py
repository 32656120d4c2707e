"""Strict parser of the answers of the judge's model. An answer that breaks any rule of the format is unreadable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from headrace_judge.rubric import SCALE_MAX, SCALE_MIN, Rubric
from headrace_schemas.values.text import printable, storable

REASON_CHARS_MAX = 4_000
_ESCAPES = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
"""A backslash, with the rest of a JSON escape if it is one."""
_ANSWER_CHARS_MAX = 65_536
_OBJECTS_MAX = 64
_AROUND = 40
_PROBLEMS_MAX = 5
_SPELLINGS = {"a": "A", "b": "B", "tie": "tie"}
_PREFERENCES: dict[str, int] = {"A": 1, "tie": 0, "B": -1}


class Unreadable(Exception):
    """Error of an answer that is not a valid verdict.

    The message is sent to the model for a repair, and never logged.
    """


class Verdict(BaseModel):
    """Parsed answer of the judge's model: a number for each criterion, or None if the model abstains.

    In mode `single` numbers are scores on the scale. In mode `pair` 1 prefers the run shown as A, -1 the run shown as
    B, and 0 neither.
    """

    model_config = ConfigDict(frozen=True)

    criteria: dict[str, int] | None
    reason: str


def _to_integer(value: object) -> object:
    """Return a float without a fraction as an integer, because models write 4.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _preference(value: object) -> object:
    """Return a preference in the capitalization that the prompt requests; return any other value unchanged."""
    return _SPELLINGS.get(value.strip().casefold(), value) if isinstance(value, str) else value


Score = Annotated[int, BeforeValidator(_to_integer), Field(ge=SCALE_MIN, le=SCALE_MAX)]
Preference = Annotated[Literal["A", "B", "tie"], BeforeValidator(_preference)]
V = TypeVar("V")


class _Answer(BaseModel, Generic[V]):
    model_config = ConfigDict(extra="forbid", strict=True)

    abstain: bool | None = False
    reason: str
    criteria: dict[str, V] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_criteria(cls, data: object) -> object:
        """Remove criteria without scores from an abstention: `{}`, or null for each criterion."""
        if isinstance(data, dict) and data.get("abstain") is True:
            criteria = data.get("criteria")
            if isinstance(criteria, dict | list) and not any(
                score is not None for score in (criteria.values() if isinstance(criteria, dict) else criteria)
            ):
                return {**data, "criteria": None}
        return data

    @model_validator(mode="after")
    def _check_exclusive(self) -> Self:
        if bool(self.abstain) == bool(self.criteria):
            raise ValueError("give either criteria, or abstain = true with a reason")
        return self


Reader = Callable[[str], Verdict]
"""Function that parses the text of an answer into a verdict, or raises `Unreadable`."""


def reader(rubric: Rubric) -> Reader:
    """Return a function that parses answers to prompts of `rubric`.

    An answer must have exactly the rubric's criteria.
    """
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
    """Return a verdict's reason without characters that a database cannot store, cut to `REASON_CHARS_MAX`.

    A cut reason ends with the number of removed characters.
    """
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
    """Return the JSON object in `text` that may be a verdict. Code fences and prose around it are ignored.

    Two different objects are refused, because one may be quoted from the run. An object with a repeated name is
    refused.
    """
    if len(text) > _ANSWER_CHARS_MAX:
        raise Unreadable(f"the answer has {len(text)} characters; at most {_ANSWER_CHARS_MAX} are read")
    candidates = [item for item in _objects(text) if {"criteria", "abstain"} & set(item)]
    if not candidates:
        raise Unreadable(f'there is no JSON object with "criteria" or "abstain" in it{_problem(text)}')
    if any(item != candidates[0] for item in candidates):
        raise Unreadable(f"there are {len(candidates)} JSON objects that differ; give one")
    return candidates[0]


def _problem(text: str) -> str:
    """Describe the syntax error in the first JSON object of an answer, with the text around its position."""
    start = text.find("{")
    if start < 0:
        return f": the answer is {printable(text)!r}" if text.strip() else ": the answer is empty"
    try:
        item, _ = _DECODER.raw_decode(_ESCAPES.sub(_repaired_escape, text), start)
    except json.JSONDecodeError as error:
        begin = max(0, error.pos - _AROUND)
        return f": {error.msg} at character {error.pos}, in {printable(text[begin : error.pos + _AROUND])!r}"
    except (ValueError, RecursionError) as error:
        return f": {printable(str(error))}, in {printable(text[start:])!r}"
    return f": the object has {printable(', '.join(map(repr, item)))}"


def _objects(text: str) -> list[dict[str, object]]:
    """Return the outermost JSON objects in `text`, in order."""
    text = _ESCAPES.sub(_repaired_escape, text)
    objects: list[dict[str, object]] = []
    start = text.find("{")
    for _ in range(_OBJECTS_MAX):
        if start < 0:
            return objects
        try:
            item, end = _DECODER.raw_decode(text, start)
            objects.append(item)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    raise Unreadable("there are too many braces in the answer to find the JSON object")


def _repaired_escape(match: re.Match[str]) -> str:
    r"""Return a valid escape unchanged. Escape the backslash of an invalid one such as `\d`."""
    return match[0] if match[1] else f"\\{match[0]}"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError("a name is given twice")
    return items


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, strict=False)
"""Decoder that accepts raw line breaks and tabs in strings, as models write them."""
