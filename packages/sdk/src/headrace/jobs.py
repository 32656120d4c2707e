"""Offline training jobs for programs, as `headrace train` runs them. Needs the package `headrace-operations` when it is
used."""

from __future__ import annotations

from headrace.stack.connection import support

_NAMES = ("Job", "RowOptions", "run")


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute: object = getattr(support("jobs", "headrace-operations"), name)
    return attribute


def __dir__() -> list[str]:
    return list(_NAMES)
