"""What metrics, which may be anybody's functions, say of a unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from headrace_registry.rollouts.metrics import Metric
from headrace_registry.rollouts.records import SessionRecord
from headrace_schemas.errors import HeadraceError


class MetricFailed(HeadraceError):
    """A metric raised, or said what is no number."""


def measured(known: Sequence[SessionRecord], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The mean over the sessions that did not abstain; nothing of a metric that all abstained from. Raises
    `MetricFailed`."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            found = [value for value in map(metric.compute, known) if value is not None]
        except Exception as error:
            raise MetricFailed(f"metric {name} failed: {type(error).__name__}: {error}; repair it") from error
        if not all(map(math.isfinite, found)):
            raise MetricFailed(f"metric {name} is {found}: it has to be a finite number, or None to abstain")
        if found:
            values[name] = fmean(found)
    return values
