"""Options that several commands share, written once: a dataclass whose fields are options, taken as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as typer wants it: each parameter that is a dataclass becomes parameters of its fields."""
    given = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, type[Any]] = {
        name: one.annotation
        for name, one in given.items()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }
    if not groups:
        return function

    @wraps(function)
    def called(**values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    parameters: list[inspect.Parameter] = []
    for name, one in given.items():
        parameters += _options(groups[name]) if name in groups else [one.replace(kind=one.KEYWORD_ONLY)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(group)
    ]
