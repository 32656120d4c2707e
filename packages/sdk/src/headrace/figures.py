"""How numbers are written for people."""

from __future__ import annotations

from collections.abc import Mapping


def figure(numbers: Mapping[str, float], name: str, error: str, form: str) -> str:
    """A number that is there, with its standard error where that is."""
    return f"{numbers[name]:{form}}" + (f" ± {numbers[error]:.3f}" if error in numbers else "")
