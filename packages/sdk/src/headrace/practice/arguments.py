"""Checks of arguments that other people's interfaces have: each is honoured, or refused by name with a remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace_schemas.plain_values import plain_number, plain_value
from headrace_schemas.text import closest, printable


def check_names(where: str, arguments: Mapping[str, Any], known: Collection[str], remedy: str = "leave it out") -> None:
    """Raise `UsageError` for the first name of the mapping `where` that is not among the `known` names."""
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{where} = {printable(repr(arguments))}: must be a table of names and values")
    for name in arguments:
        if name not in known:
            similar = closest(str(name), known)
            names = f"did you mean {similar}?" if similar else f"there are {', '.join(sorted(known))}"
            raise UsageError(f"{where}.{printable(str(name))}: means nothing here; {names}; {remedy}")


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an integer of at least `least`. Raises `UsageError`."""
    number = real_number(name, value, "a whole number")
    if number != int(number):
        raise UsageError(f"{name} = {printable(repr(value))}: must be a whole number")
    if number < least:
        raise UsageError(f"{name} = {printable(repr(value))}: must be at least {least}")
    return int(number)


def real_number(name: str, value: Any, kind: str = "a number") -> float:
    """Return `value`, of whatever library, as a finite float. Raises `UsageError`; a boolean is no number."""
    try:
        if isinstance(plain_value(value), bool):
            raise TypeError
        return plain_number(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} = {printable(repr(value))}: must be {kind}") from None


def score(name: str, value: Any) -> float:
    """Return what a user's function gave as a reward or a metric as a finite float; true is 1. Raises `UsageError`."""
    try:
        return plain_number(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} = {printable(repr(value))}: must be a finite number: {error}") from None


def yes_or_no(name: str, value: Any) -> bool:
    """Return `value` as a boolean. Raises `UsageError` for all else: the text "false" would count as true."""
    plain = plain_value(value)
    if not isinstance(plain, bool):
        raise UsageError(f"{name} = {printable(repr(value))}: must be True or False")
    return plain


def merge_settings(
    own: Mapping[str, object], named: Mapping[str, object], names: Mapping[str, str]
) -> dict[str, object]:
    """Return the settings `own`, which arguments stand for, with those that `settings` names.

    Args:
        names: the argument behind a setting. A setting that an argument sets otherwise is refused.

    Raises:
        UsageError: an argument and `settings` set the same to different values.
    """
    for setting, value in named.items():
        if setting in names and setting in own and own[setting] != value:
            raise UsageError(
                f"{names[setting]} sets {setting} = {own[setting]!r}, and settings has {value!r}; leave one of them out"
            )
    return {**own, **named}


def check_unchanged(config: Any, reasons: Mapping[str, tuple[object, str]]) -> None:
    """Raise `UsageError` for the first attribute of `config` that is set and has no meaning here.

    Args:
        reasons: the default of each attribute, and the sentence that follows name and value.
    """
    for name, (default, reason) in reasons.items():
        value = getattr(config, name, default)
        if value != default:
            raise UsageError(f"{name} = {printable(repr(value))}: {reason}")
