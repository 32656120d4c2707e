"""The section `[scorer.drift]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Section


class DriftSettings(Section):
    """Alarm for judges that agree with people less than at first."""

    judges: tuple[str, ...] = ("judge:*",)
    """Sources that are monitored. Their values are from 0 to 1."""
    people: tuple[str, ...] = ("feedback",)
    """Sources that the judges are compared with. Their values are from 0 to 1."""
    reference: Annotated[int, Field(ge=20)] = 200
    """Number of first runs, scored by both, that determine the usual disagreement."""
    false_alarm_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Largest probability that a judge which does not drift ever raises an alarm."""
