"""Checks of arguments and of model names for interfaces of other systems.

Each argument is honoured, or refused by name with a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_schemas.values.text import closest, plain_number, plain_value, printable


def check_names(
    where: str, arguments: Mapping[str, Any], allowed: Collection[str], remedy: str = "leave it out"
) -> None:
    """Raise `UsageError` for the first name in `arguments` that is not one of the `allowed` names.

    Args:
        where: name of the argument that holds the mapping, for messages.
        arguments: the mapping of names to values.
        allowed: the names that have an effect.
        remedy: the last clause of the message.
    """
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{where} = {printable(repr(arguments))}: must be a mapping of names to values")
    for name in arguments:
        if name not in allowed:
            similar = closest(str(name), allowed)
            names = f"did you mean {similar}?" if similar else f"the names are {', '.join(sorted(allowed))}"
            raise UsageError(f"{where}.{printable(str(name))}: has no effect here; {names}; {remedy}")


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an integer of at least `least`. Raises `UsageError` for any other value."""
    number = real_number(name, value, "a whole number")
    if number != int(number):
        raise UsageError(f"{name} = {printable(repr(value))}: must be a whole number")
    if number < least:
        raise UsageError(f"{name} = {printable(repr(value))}: must be at least {least}")
    return int(number)


def real_number(name: str, value: Any, kind: str = "a number") -> float:
    """Return a number of any library as a finite float. Raises `UsageError`, also for a boolean."""
    try:
        if isinstance(plain_value(value), bool):
            raise TypeError
        return plain_number(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} = {printable(repr(value))}: must be {kind}") from None


def score(name: str, value: Any) -> float:
    """Return the reward or metric of a user's function as a finite float; true is 1. Raises `UsageError` otherwise."""
    try:
        return plain_number(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} = {printable(repr(value))}: must be a finite number: {error}") from None


def yes_or_no(name: str, value: Any) -> bool:
    """Return `value` as a boolean.

    Raises:
        UsageError: the value is not a boolean. Other types are refused because, for example, the text "false" would
            count as true.
    """
    plain = plain_value(value)
    if not isinstance(plain, bool):
        raise UsageError(f"{name} = {printable(repr(value))}: must be True or False")
    return plain


def merge_settings(
    argument_settings: Mapping[str, object], user_settings: Mapping[str, object], names: Mapping[str, str]
) -> dict[str, object]:
    """Return the settings that arguments determine, merged with the settings that the user passed.

    Args:
        argument_settings: the settings that arguments determine.
        user_settings: the settings that the user passed.
        names: the name of the argument that determines each setting.

    Raises:
        UsageError: an argument and the user set the same setting to different values.
    """
    for setting, value in user_settings.items():
        if setting in names and setting in argument_settings and argument_settings[setting] != value:
            raise UsageError(
                f"{names[setting]} sets {setting} = {argument_settings[setting]!r}, and settings has {value!r}; "
                "leave one of them out"
            )
    return {**argument_settings, **user_settings}


def check_unchanged(config: Any, reasons: Mapping[str, tuple[object, str]]) -> None:
    """Raise `UsageError` for the first attribute of `config` that differs from its default and has no effect here.

    Args:
        config: the object that the user passed.
        reasons: default of each attribute, and the text that follows the attribute's name and value in the message.
    """
    for name, (default, reason) in reasons.items():
        value = getattr(config, name, default)
        if value != default:
            raise UsageError(f"{name} = {printable(repr(value))}: {reason}")


def model_name(path: str | Path) -> str:
    """Return the model name for a model folder or a path such as `Qwen/Qwen3-0.6B`.

    The name has no slash, because names of models may not have one.
    """
    last = str(path).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-_") or "model"
