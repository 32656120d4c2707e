"""Metrics of a session's record by name. Packages announce them under the entry points `headrace.rollout_metrics`.

The metrics of this package are announced in its own `pyproject.toml`. A metric is a plain function, marked with
`metric`, of a session's record: the events about the session, as they were known at some time. A session for which it
returns None is left out of that metric's comparison. The name `reward:judge:helpfulness` selects the metric `reward`,
marked with `of_source`, for that source.
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
    """Record of one session: its events, each kind in the order of its topic."""

    session_key: str
    turns: tuple[Turn, ...] = ()
    """Whole turns; those that extend a turn which was not stored are as they were on the topic."""
    trajectories: tuple[Trajectory, ...] = ()
    rewards: tuple[Reward, ...] = ()
    feedback: tuple[Feedback, ...] = ()

    def as_of(self, time: datetime) -> SessionRecord:
        """Return the record without events later than `time`, by the producers' clocks."""
        return SessionRecord(
            self.session_key,
            tuple(event for event in self.turns if event.time <= time),
            tuple(event for event in self.trajectories if event.time <= time),
            tuple(event for event in self.rewards if event.time <= time),
            tuple(event for event in self.feedback if event.time <= time),
        )

    @property
    def standing_rewards(self) -> tuple[Reward, ...]:
        """Rewards of the session that are valid now: the highest revision of each source for each trajectory, turn or
        answer, also if it is an abstention.
        """
        latest: dict[tuple[str, str | None, int | None, str], Reward] = {}
        for reward in self.rewards:
            subject = reward.trajectory_id, reward.turn_id, reward.choice, reward.source
            if subject not in latest or reward.revision >= latest[subject].revision:
                latest[subject] = reward
        return tuple(latest.values())

    @property
    def standing_feedback(self) -> tuple[Feedback, ...]:
        """The last feedback of each rater of a source on each target, without withdrawals and feedback without a value.

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
        """The longest conversation of the session with the answer at its end; empty without turns."""
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
    """A metric raised an error or returned a value that is not a finite number."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of a session: a function, the better direction, and the bounds of its values.

    A value outside `bounds` counts as the nearer bound: the mean of the clipped values is compared.
    """

    compute: Compute
    higher_is_better: bool
    bounds: tuple[float, float]

    def __post_init__(self) -> None:
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds {self.bounds}: the lower one comes first, and they differ")

    def within(self, bounds: tuple[float, float] | None) -> Metric:
        """Return the metric with `bounds` as its range of values, or unchanged if `bounds` is None."""
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
    """Metric that exists for each source of rewards or feedback, and for all of them together when no source is
    given."""

    compute: ComputeOfSource
    higher_is_better: bool
    bounds: tuple[float, float]

    def of(self, source: str) -> Metric:
        return Metric(lambda record: self.compute(record, source), self.higher_is_better, self.bounds)


METRICS: Registry[object] = Registry("rollout_metrics", object, "metric")


def metric(*, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)) -> Callable[[Compute], Metric]:
    """Return a decorator that makes a function of a session a metric, with its direction and bounds."""
    return lambda compute: Metric(compute, higher_is_better, bounds)


def of_source(
    *, higher_is_better: bool, bounds: tuple[float, float] = (0.0, 1.0)
) -> Callable[[ComputeOfSource], MetricOfSource]:
    """Return a decorator for metrics whose function also takes the name of a source; an empty name stands for all
    sources."""
    return lambda compute: MetricOfSource(compute, higher_is_better, bounds)


@cache
def metric_named(name: str) -> Metric:
    """Return the metric of that name. It is looked up once in a process.

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
    """Return the mean of each metric over the sessions in which it did not abstain.

    Metrics that always abstained are left out.

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
