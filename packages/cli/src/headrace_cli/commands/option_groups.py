"""Groups of options that several commands share: a dataclass whose fields are options, used as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def expand_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` for typer: each parameter that is a dataclass is replaced by one parameter for each field."""
    parameters_by_name = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, type[Any]] = {
        name: parameter.annotation
        for name, parameter in parameters_by_name.items()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    if not groups:
        return function

    @wraps(function)
    def wrapper(**values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in parameters_by_name.items():
        parameters += _options(groups[name]) if name in groups else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[option.name]
        )
        for option in fields(group)
    ]
