"""Metrics of sessions by name, which packages announce as entry points `headrace.rollout_metrics`.

The metrics of this package are announced in its own `pyproject.toml`. A metric is a function, decorated with `metric`,
whose argument is a session's record: the events about the session that were known at a certain time. If it returns
None, the session is ignored for this metric. The name `reward:judge:helpfulness` stands for the metric `reward`,
decorated with `of_source`, for the source `judge:helpfulness`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from statistics import fmean

from headrace_runtime.registries import Registry
from headrace_schemas import Feedback, Message, Reward, Trajectory, Turn
from headrace_schemas.values.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Events about one session, each kind in the order of its topic."""

    session_key: str
    turns: tuple[Turn, ...] = ()
    """Turns in complete form. A turn that extends a turn which is not stored has only the part that its event
    contains."""
    trajectories: tuple[Trajectory, ...] = ()
    rewards: tuple[Reward, ...] = ()
    feedback: tuple[Feedback, ...] = ()

    def as_of(self, time: datetime) -> SessionRecord:
        """Return the record without events later than `time`, according to the clocks of the services that produced
        them."""
        return SessionRecord(
            self.session_key,
            tuple(event for event in self.turns if event.time <= time),
            tuple(event for event in self.trajectories if event.time <= time),
            tuple(event for event in self.rewards if event.time <= time),
            tuple(event for event in self.feedback if event.time <= time),
        )

    @property
    def standing_rewards(self) -> tuple[Reward, ...]:
        """Rewards that are valid: of each source, the highest revision for each trajectory, turn or answer, even if it
        abstains."""
        latest: dict[tuple[str, str | None, int | None, str], Reward] = {}
        for reward in self.rewards:
            subject = reward.trajectory_id, reward.turn_id, reward.choice, reward.source
            if subject not in latest or reward.revision >= latest[subject].revision:
                latest[subject] = reward
        return tuple(latest.values())

    @property
    def standing_feedback(self) -> tuple[Feedback, ...]:
        """Feedback that is valid: of each rater and source, the last feedback on each target. Withdrawn feedback and
        feedback without a value are left out.

        An edit or a preference has no value, and leaves the value that was given to the same answer.
        """
        latest: dict[tuple[object, ...], Feedback] = {}
        for item in self.feedback:
            if item.feedback_kind == "value" and (item.value is not None or item.label is not None or item.withdrawn):
                target = item.level, tuple(sorted(item.msg_ids)), item.choice
                latest[item.source, item.metric, item.rater, *target] = item
        return tuple(item for item in latest.values() if item.value is not None and not item.withdrawn)

    @property
    def dialogue(self) -> tuple[Message, ...]:
        """The longest conversation of the session, including its last answer; empty for a session without turns."""
        longest = max(
            (turn for turn in self.turns if turn.extends is None), key=lambda turn: len(turn.messages), default=None
        )
        if longest is None:
            return ()
        return (*longest.messages, longest.choices[0].message)

    @property
    def answers(self) -> tuple[Message, ...]:
        """All answers of the model: each choice of each turn."""
        return tuple(choice.message for turn in self.turns for choice in turn.choices)


Compute = Callable[[SessionRecord], float | None]
ComputeOfSource = Callable[[SessionRecord, str], float | None]


class MetricFailed(HeadraceError):
    """Raised if a metric raises an error or returns a value that is not a finite number."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of a session: a function, whether higher values are better, and the bounds of its values.

    A value outside of `bounds` is replaced by the nearer bound before values are compared.
    """

    compute: Compute
    higher_is_better: bool
    bounds: tuple[float, float]

    def __post_init__(self) -> None:
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds {self.bounds}: the lower one comes first, and they differ")

    def within(self, bounds: tuple[float, float] | None) -> Metric:
        """Return the metric with other bounds of its values; the same metric if `bounds` is None."""
        return replace(self, bounds=bounds) if bounds else self

    @property
    def width(self) -> float:
        return self.bounds[1] - self.bounds[0]

    def goodness(self, value: float) -> float:
        """Return `value` scaled linearly to [0, 1], so that larger is better."""
        share = (min(max(value, self.bounds[0]), self.bounds[1]) - self.bounds[0]) / self.width
        return share if self.higher_is_better else 1.0 - share


@dataclass(frozen=True, slots=True)
class MetricOfSource:
    """Metric that can be computed for one source of rewards or feedback, or for all sources together."""

    compute: ComputeOfSource
    higher_is_better: bool
    bounds: tuple[float, float]

    def of(self, source: str) -> Metric:
        return Metric(lambda record: self.compute(record, source), self.higher_is_better, self.bounds)


METRICS: Registry[object] = Registry("rollout_metrics", object, "metric")


def metric(*, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)) -> Callable[[Compute], Metric]:
    """Return a decorator that turns a function of a session's record into a `Metric`."""
    return lambda compute: Metric(compute, higher_is_better, bounds)


def of_source(
    *, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)
) -> Callable[[ComputeOfSource], MetricOfSource]:
    """Return a decorator that turns a function of a session's record and a source into a `MetricOfSource`. An empty
    source stands for all sources."""
    return lambda compute: MetricOfSource(compute, higher_is_better, bounds)


@cache
def metric_named(name: str) -> Metric:
    """Return the metric with this name. The result is cached.

    Raises:
        ValueError: no package announces the name, or the announced object is not a metric.
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
    """Return the mean of each metric over the sessions for which it has a value.

    Metrics without any value are left out.

    Raises:
        MetricFailed: a metric raised an error, or its values or their sum are no finite numbers.
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
            try:
                values[name] = fmean(metric_values)
            except OverflowError:
                largest = max(map(abs, metric_values))
                text = f"metric {name} is up to {largest}: its mean cannot be computed; return smaller numbers"
                raise MetricFailed(text) from None
    return values
