"""Format numbers for people."""

from __future__ import annotations

from collections.abc import Mapping


def figure(numbers: Mapping[str, float], name: str, error: str, form: str) -> str:
    """Format the number `name`, with the standard error `error` if `numbers` has it."""
    return f"{numbers[name]:{form}}" + (f" ± {numbers[error]:.3f}" if error in numbers else "")
