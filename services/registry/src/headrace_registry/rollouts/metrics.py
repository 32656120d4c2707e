"""Metrics by name. Packages announce them under the entry points `headrace.rollout_metrics`.

The metrics of this package are announced in its own `pyproject.toml`. A metric is a plain function of a session's
record, marked with `metric`. A session for which it returns None is left out of that metric's comparison. The name
`reward:judge:helpfulness` selects the metric `reward`, marked with `of_source`, for that source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from headrace_registry.rollouts.records import SessionRecord
from headrace_runtime.registries import Registry
from headrace_schemas.values.errors import HeadraceError

Compute = Callable[[SessionRecord], float | None]
ComputeOfSource = Callable[[SessionRecord, str], float | None]


class MetricFailed(HeadraceError):
    """A metric raised an error or returned a value that is not a finite number."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A function of a session, the better direction, and the bounds of its values.

    A value outside `bounds` counts as the nearer bound: the mean of the clipped values is compared.
    """

    compute: Compute
    higher_is_better: bool
    bounds: tuple[float, float]

    def __post_init__(self) -> None:
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds {self.bounds}: the lower one comes first, and they differ")

    def within(self, bounds: tuple[float, float] | None) -> Metric:
        """Return the same metric with other bounds."""
        return replace(self, bounds=bounds) if bounds else self

    @property
    def width(self) -> float:
        return self.bounds[1] - self.bounds[0]

    def goodness(self, value: float) -> float:
        """Return `value` scaled to [0, 1], larger being better."""
        share = (min(max(value, self.bounds[0]), self.bounds[1]) - self.bounds[0]) / self.width
        return share if self.higher_is_better else 1.0 - share


@dataclass(frozen=True, slots=True)
class MetricOfSource:
    """A metric for each source, and for all of them together when no source is given."""

    compute: ComputeOfSource
    higher_is_better: bool
    bounds: tuple[float, float]

    def of(self, source: str) -> Metric:
        return Metric(lambda record: self.compute(record, source), self.higher_is_better, self.bounds)


METRICS: Registry[object] = Registry("rollout_metrics", object, "metric")


def metric(*, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)) -> Callable[[Compute], Metric]:
    """Mark a function as a metric, with its direction and bounds."""
    return lambda compute: Metric(compute, higher_is_better, bounds)


def of_source(
    *, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)
) -> Callable[[ComputeOfSource], MetricOfSource]:
    """Mark a function that also takes the name of a source; an empty name stands for all sources."""
    return lambda compute: MetricOfSource(compute, higher_is_better, bounds)


@cache
def metric_named(name: str) -> Metric:
    """Return the metric of that name, which is looked up once in a process.

    Raises:
        ValueError: No package announces the name, or the announced object is not a metric.
    """
    stem, _, source = name.partition(":")
    metric = METRICS.get(stem)
    if isinstance(metric, MetricOfSource):
        return metric.of(source)
    if not isinstance(metric, Metric):
        raise ValueError(
            f"{METRICS.point(stem).value} is not a metric; mark it with headrace_registry.rollouts.metrics.metric"
        )
    if source:
        raise ValueError(f"metric {stem!r} has no sources; leave {':' + source!r} out")
    return metric


def compute_metrics(sessions: Sequence[SessionRecord], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the mean of each metric over the sessions that did not abstain, without metrics that always abstained.

    Raises:
        MetricFailed: A metric raised an error or returned a value that is not a finite number.
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            metric_values = [value for value in map(metric.compute, sessions) if value is not None]
        except Exception as error:
            raise MetricFailed(f"metric {name} failed: {type(error).__name__}: {error}; repair it") from error
        if not all(map(math.isfinite, metric_values)):
            raise MetricFailed(f"metric {name} is {metric_values}: it has to be a finite number, or None to abstain")
        if metric_values:
            values[name] = fmean(metric_values)
    return values
