"""Metrics by name: whatever an installed package announces under the entry points `headrace.rollout_metrics`.

Ours are announced in this package's own `pyproject.toml`. A metric is a plain function of a session's record that is
marked with `metric`; None abstains, and a session that abstains is no part of that metric's comparison. A name like
`reward:judge:helpfulness` asks the metric `reward`, marked with `of_source`, for the one of that source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from headrace_registry.rollouts.records import SessionRecord
from headrace_runtime.registries import Registry

Compute = Callable[[SessionRecord], float | None]
ComputeOfSource = Callable[[SessionRecord, str], float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """What is measured, which direction is better, and between which bounds it lies.

    A value outside of `bounds` counts as the nearer one: what is compared is the mean of values cut off there.
    """

    compute: Compute
    higher_is_better: bool
    bounds: tuple[float, float]

    def __post_init__(self) -> None:
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds {self.bounds}: the lower one comes first, and they differ")

    def within(self, bounds: tuple[float, float] | None) -> Metric:
        """The same metric, cut off at other bounds."""
        return replace(self, bounds=bounds) if bounds else self

    @property
    def width(self) -> float:
        return self.bounds[1] - self.bounds[0]

    def goodness(self, value: float) -> float:
        """`value` in [0, 1], more being better."""
        share = (min(max(value, self.bounds[0]), self.bounds[1]) - self.bounds[0]) / self.width
        return share if self.higher_is_better else 1.0 - share


@dataclass(frozen=True, slots=True)
class MetricOfSource:
    """A metric for each source, and for all of them together when none is named."""

    compute: ComputeOfSource
    higher_is_better: bool
    bounds: tuple[float, float]

    def of(self, source: str) -> Metric:
        return Metric(lambda record: self.compute(record, source), self.higher_is_better, self.bounds)


METRICS: Registry[object] = Registry("rollout_metrics", object, "metric")


def metric(*, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)) -> Callable[[Compute], Metric]:
    """Marks a function as a metric and says what it lies between."""
    return lambda compute: Metric(compute, higher_is_better, bounds)


def of_source(
    *, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)
) -> Callable[[ComputeOfSource], MetricOfSource]:
    """Marks a function that also takes the name of a source, empty for all of them."""
    return lambda compute: MetricOfSource(compute, higher_is_better, bounds)


@cache
def named(name: str) -> Metric:
    """Looked up once in a process: what is installed stays.

    Raises `ValueError` for a name that nobody announces, with those there are, and for what is no metric.
    """
    stem, _, source = name.partition(":")
    found = METRICS.get(stem)
    if isinstance(found, MetricOfSource):
        return found.of(source)
    if not isinstance(found, Metric):
        raise ValueError(
            f"{METRICS.point(stem).value} is no metric; mark it with headrace_registry.rollouts.metrics.metric"
        )
    if source:
        raise ValueError(f"metric {stem!r} knows no sources; leave {':' + source!r} out")
    return found
