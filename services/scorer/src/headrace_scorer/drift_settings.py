"""The section `[scorer.drift]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.settings import Section


class DriftSettings(Section):
    """When a judge that people agree with less than before raises an alarm."""

    judges: tuple[str, ...] = ("judge:*",)
    """Sources that are watched. Their values are from 0 to 1."""
    people: tuple[str, ...] = ("feedback",)
    """Sources that they are compared with, also from 0 to 1."""
    reference: Annotated[int, Field(ge=20)] = 200
    """Runs that both have scored at first: they say how much disagreement is usual."""
    false_alarm_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """How probable it is at most that a judge which does not drift ever raises an alarm."""
