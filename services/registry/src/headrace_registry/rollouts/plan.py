"""Rules of a rollout, which are fixed before its first session: stages, guardrails, margins, error rates, limits, and
the ages of units (users or sessions) at which their metrics are computed (read).

The metrics of a unit are computed at a fixed age, with the events that have arrived by then. They are not computed when
a reward arrives, because rewards of one arm may arrive sooner, nor when the session ends, because bad sessions may be
longer. So units are evaluated in the order of their arrival, and the arm of the next unit is random.

A computed value is never changed. A reward that arrives or is revised later, but before the closing age, is part of the
values at the closing age, which have e-processes of their own. The probability that a test at one of both ages is ever
wrong is at most the sum of their errors. Starting again with corrected values would be a new test for each correction,
without a bound on the total error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.estimate import EstimateRequirements
from headrace_registry.rollouts.metrics import Metric, SessionRecord, compute_metrics
from headrace_runtime.settings.sections import Section
from headrace_schemas.values.base import Finite, Model, Text
from headrace_statistics import e_process

ReadingAge = Literal["shadow", "maturity", "closing"]
"""Age at which the metrics of a unit are computed: in the shadow, at maturity, or when the unit is closed."""

Probability = Annotated[Finite, Field(gt=0, le=0.5)]
Positive = Annotated[Finite, Field(gt=0)]
Bounds = tuple[Finite, Finite]
_SHADOW, _CLOSING = Fraction(1, 10), Fraction(1, 10)
"""Fractions of β for the shadow and for the closing age. The age of maturity gets the rest, which is most of it, so
that harm is detected soon."""
_REWARDS = ("reward", "success")
SHARE_MAX = Fraction(1, 2)
"""Largest share of a candidate: its control has the same."""
_METRICS_MAX = 12
"""Maximum number of metrics. Each adds four statistics to a decision, which can contain 64."""


class Guardrail(Model):
    """A metric that must not get worse. Margins are absolute, in the metric's own unit."""

    metric: Text
    margin: Positive
    """A version that is worse by this much is promoted with probability `alpha` at most. The test for harm is tuned to
    differences of this size and of twice this size."""
    tolerated: Annotated[Finite, Field(ge=0)] = 0.0
    """Loss that does not count as harm."""
    weight: Positive = 1.0
    """Share of `beta` for this guardrail, relative to the others. Half the weight costs ln 2 = 0.7 more evidence."""
    bounds: Bounds | None = None
    """Bounds that replace the metric's own."""

    @property
    def measured(self) -> Metric:
        """Metric that this guardrail watches, with the guardrail's `bounds` if it has any.

        Raises `ValueError` if no installed package provides the metric.
        """
        return metrics.metric_named(self.metric).within(self.bounds)


class Success(Model):
    """Test of a metric that a candidate must pass to be promoted. Of several, one passed test is enough."""

    metric: Text
    kind: Literal["improved", "not_inferior"] = "not_inferior"
    margin: Positive
    """`not_inferior`: worse by less than this. `improved`: better by any amount, with a test tuned to gains of this
    size."""
    bounds: Bounds | None = None

    @property
    def measured(self) -> Metric:
        return metrics.metric_named(self.metric).within(self.bounds)


class RolloutStage(Model):
    """Stage of a rollout: which share of the users or sessions the candidate serves, and how many of them and how much
    time are needed before the next stage.
    """

    share: Annotated[Fraction, Field(gt=0, le=SHARE_MAX)]
    """The control gets the same share. Only a promotion gives a version all units."""
    units_min: Annotated[int, Field(ge=0)] = 0
    """Mature units of the candidate, since the rollout began."""
    duration_min_s: Annotated[Finite, Field(ge=0)] = 0.0
    """Seconds in this stage."""


def _stages(*shares: Fraction) -> tuple[RolloutStage, ...]:
    return tuple(RolloutStage(share=share, units_min=20 * number) for number, share in enumerate(shares, 1))


class RolloutPlan(Section):
    """Rules of a rollout. A fixed split (A/B) has one stage; with `promotes` false its end changes no role."""

    unit: Literal["session", "user"] = "session"
    """Unit that is assigned to an arm: sessions, or users (the request's `user`, `X-User-Id` or `metadata.user_id`; a
    session without any of these is a user of its own)."""
    slots: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of candidates at a time. Each has a control of its own size within one block of units, so a candidate gets
    1 / (slots + 1) of them at most, whatever its stage allows. The number does not change while a rollout is under
    way."""
    split: Literal["even", "adaptive"] = "even"
    """`adaptive`: of several candidates at a time, those that are probably not the best get less than the share of
    their stage (Thompson's rule), and the leader all of it. Needs `unit = "session"`: a share that shrinks would move
    users."""
    floor: Annotated[Fraction, Field(gt=0, le=1)] = Fraction(1, 8)
    """`split = "adaptive"`: the part of its stage's share that a candidate always gets, so that one with a few bad
    sessions at first is measured further."""
    shadow_units: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Number of prompts of users' sessions that both versions answer again, unseen by users, before the candidate gets
    traffic; 0: no shadow. `registry.rollout.shadow` sets the tenants and the limits."""
    shadow_duration_max_s: Positive = 21_600.0
    """Seconds after which the canary begins with the findings of the shadow so far: six hours, so that a model with few
    prompts is not held for days."""
    shadow_demands: EstimateRequirements = EstimateRequirements()
    """Minimum numbers for an estimate from the shadow: with fewer, its interval does not hold at the stated rate."""
    stages: tuple[RolloutStage, ...] = Field(
        default=_stages(Fraction(1, 100), Fraction(1, 10), Fraction(1, 2)), min_length=1, max_length=16
    )
    """The ramp: `share` of the units, then `units_min` of the candidate and `duration_min_s` before the next stage."""
    exposure_max: Annotated[Fraction, Field(gt=0, le=SHARE_MAX)] = Fraction(1, 10)
    """Share of the units that may get a version about which nothing is known. A larger share waits until sessions have
    ruled out, for each guardrail, so large a loss that no more is at stake: five times the share needs the loss to be
    less than a fifth of the worst value of the metric."""
    experiences: Literal["keep", "exclude"] = "keep"
    """Training on the answers of a version that its rollout rolled back: `keep` trains on them like on any bad answer,
    `exclude` drops them and undoes their training."""
    guardrails: tuple[Guardrail, ...] = Field(
        default=(
            Guardrail(metric="reward", margin=0.1, weight=12),
            Guardrail(metric="missing", margin=0.1, weight=2),
            Guardrail(metric="tool_errors", margin=0.1),
            Guardrail(metric="loops", margin=0.1),
        ),
        min_length=1,
        max_length=8,
    )
    """Metrics that must not get worse: `metric`, absolute `margin`, `tolerated`, `weight` of beta, `bounds`."""
    successes: tuple[Success, ...] = Field(default=(Success(metric="reward", margin=0.1),), min_length=1, max_length=4)
    """Reasons to promote a version, of which one is enough: `metric`, `kind` (improved, not_inferior), `margin`,
    `bounds`."""
    watched: tuple[Text, ...] = Field(default=("success", "latency", "satisfaction"), max_length=8)
    """Further metrics that are measured and shown; no decision depends on them."""
    alpha: Probability = 0.05
    """Probability of a wrong promotion, over all versions together that are tried against a champion or its equals."""
    beta: Probability = 0.05
    """Probability that a version without harm is rolled back."""
    sample_ratio_error: Probability = 0.01
    """Probability that sound traffic is held because the arms seem to have wrong sizes. The usual level of such tests:
    an alarm stops a rollout, so it must be rare."""
    uneven: Annotated[Finite, Field(gt=0, le=1)] = 0.15
    """Difference of the arms, as a share of both together, at which a version is promoted with probability `alpha` at
    most: for example a candidate that loses a quarter of its sessions. Lost sessions cannot be compared."""
    maturity_s: Positive = 600.0
    """Age in seconds at which a unit is read first, with the rewards that it has by then."""
    closing_s: Positive = 7200.0
    """Age in seconds at which a unit is read for the last time; later feedback and revisions have no effect."""
    window_s: Annotated[Finite, Field(ge=0)] = 0.0
    """`unit = "user"`: seconds after a user's first session during which further sessions belong to the same unit."""
    units_max: Annotated[int, Field(ge=1)] = 20_000
    """Number of mature units of the candidate after which the rollout is held."""
    duration_max_s: Positive = 604_800.0
    """Seconds after which the rollout is held."""
    promotes: bool = True
    """Whether a version that was shown good enough is promoted; if false it ends in hold, and an operator may promote
    it."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.closing_s < self.maturity_s:
            raise ValueError(f"closing_s = {self.closing_s:g} is before maturity_s = {self.maturity_s:g}")
        if self.unit == "session" and self.window_s:
            raise ValueError(f'window_s = {self.window_s:g} is for unit = "user"; leave it 0')
        if self.split == "adaptive" and self.unit != "session":
            raise ValueError('split = "adaptive" needs unit = "session": a share that shrinks would move users')
        shares = [stage.share for stage in self.stages]
        if any(later <= earlier for earlier, later in pairwise(shares)):
            raise ValueError(f"shares {', '.join(map(str, shares))}: each stage has more than the one before")
        rules: tuple[Guardrail | Success, ...] = (*self.guardrails, *self.successes)
        for rule in rules:
            if rule.margin > rule.measured.width:
                raise ValueError(
                    f"margin {rule.margin:g} of {rule.metric}: its bounds are only {rule.measured.width:g} apart"
                )
        for guardrail in self.guardrails:
            if guardrail.tolerated >= guardrail.margin:
                raise ValueError(
                    f"tolerated = {guardrail.tolerated:g} of {guardrail.metric}: set it below the margin "
                    f"{guardrail.margin:g}, which must not be exceeded"
                )
        self._check_distinct()
        return self

    def _check_distinct(self) -> None:
        guarded = [rule.metric for rule in self.guardrails]
        for names in (guarded, [rule.metric for rule in self.successes]):
            if len(set(names)) < len(names):
                raise ValueError(f"{', '.join(names)}: name each metric once")
        all_metrics = {*guarded, *(rule.metric for rule in self.successes), *self.watched}
        if len(all_metrics) > _METRICS_MAX:
            raise ValueError(
                f"{len(all_metrics)} metrics: {_METRICS_MAX} at most, so that a decision has room for all of them"
            )
        for name in self.watched:
            metrics.metric_named(name)
        bounds = {rule.metric: rule.bounds for rule in self.guardrails}
        for success in self.successes:
            if bounds.get(success.metric, success.bounds) != success.bounds:
                raise ValueError(
                    f"{success.metric} has other bounds as a guardrail than as a success; give it one pair"
                )
        reward_metrics = {
            name for name in (*guarded, *(rule.metric for rule in self.successes)) if _stem(name) in _REWARDS
        }
        if reward_metrics and not any(_stem(name) == "missing" for name in guarded):
            raise ValueError(
                f"{', '.join(sorted(reward_metrics))} without a guardrail on missing: sessions without a reward are "
                "not compared, so a version that loses its bad sessions would look better; add a guardrail on missing"
            )

    def loss_to_rule_out(self, share: Fraction) -> Fraction | None:
        """Return the loss that must be excluded by evidence before a candidate gets `share` of the traffic.

        This limits the possible harm to all users: share times loss is at most `exposure_max`.

        Returns:
            The loss as a fraction of the metric's range; None if no evidence is required.
        """
        return None if share <= self.exposure_max else self.exposure_max / share

    @property
    def reading_ages(self) -> Mapping[ReadingAge, Fraction]:
        """Ages at which the metrics of a unit are computed, each with its fraction of `beta`, the error probability of
        all tests for harm.

        The shares add up to 1.
        """
        shadow = _SHADOW if self.shadow_units else Fraction(0)
        closing = _CLOSING if self.closing_s > self.maturity_s else Fraction(0)
        shares: dict[ReadingAge, Fraction] = {"shadow": shadow, "maturity": 1 - shadow - closing, "closing": closing}
        return {age: share for age, share in shares.items() if share}

    @property
    def last_reading_age(self) -> ReadingAge:
        """Name of the last age at which the metrics of a unit are computed. Promotions depend on the values at this
        age."""
        return "closing" if "closing" in self.reading_ages else "maturity"

    def age_s(self, age: ReadingAge) -> float:
        """Return the length of an age: the seconds from the first session of a unit until its metrics are computed."""
        return self.window_s + (self.closing_s if age == "closing" else self.maturity_s)

    def harm_error(self, guardrail: Guardrail, age: ReadingAge) -> float:
        """Return the error probability of one guardrail's test for harm at one age. The probabilities of all such tests
        add up to β."""
        weights = sum(rule.weight for rule in self.guardrails)
        return e_process.harm_error(self.beta, guardrail.weight / weights * float(self.reading_ages[age]))


def _stem(metric: str) -> str:
    return metric.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Unit:
    """Session or user (see `RolloutPlan.unit`) that was assigned to an arm of a rollout."""

    name: str
    candidate: bool
    enrolled: datetime
    """Time at which its first session began. For a user, only sessions since the assignment to the arm count."""

    @property
    def order_key(self) -> tuple[datetime, str]:
        """Sort key by which units are evaluated in the order of their arrival.

        Units that arrived at the same time are sorted by name, which does not depend on the arm.
        """
        return self.enrolled, self.name


@dataclass(frozen=True, slots=True)
class UnitReading:
    """Metric values of one unit at one age. A metric without a value for the unit is not in `values`."""

    unit: Unit
    values: Mapping[str, float]
    expected: Mapping[str, float] = field(default_factory=dict)
    """Values that were predicted before the arm of the unit was known, for some or all metrics."""


def due_units(units: Iterable[Unit], now: datetime, age_s: float) -> list[Unit]:
    """Return the units that have reached an age, in the order in which their metrics must be computed.

    Args:
        now: time up to which all topics have been read, by the rollout's clock.
        age_s: the age in seconds since the beginning of the unit's first session.
    """
    age = timedelta(seconds=age_s)
    return sorted((unit for unit in units if unit.enrolled + age <= now), key=lambda unit: unit.order_key)


def read_unit(
    unit: Unit, sessions: Sequence[SessionRecord], metrics: Mapping[str, Metric], age_s: float
) -> UnitReading:
    """Compute the metric values of a unit from the events up to an age.

    Args:
        sessions: the unit's sessions. A metric of a user is the mean over the sessions for which it has a value.
        age_s: the age in seconds since the beginning of its first session.
    """
    time = unit.enrolled + timedelta(seconds=age_s)
    return measure_unit(unit, [session.as_of(time) for session in sessions], metrics)


def measure_unit(unit: Unit, sessions: Sequence[SessionRecord], metrics: Mapping[str, Metric]) -> UnitReading:
    """Compute the metric values of a unit.

    Args:
        sessions: the unit's sessions, with the events that were known at the age.

    Raises:
        MetricFailed: as `compute_metrics`.
    """
    return UnitReading(unit, compute_metrics(sessions, metrics))
