"""Evidence from the units (users or sessions) of one rollout: sequential tests (e-processes) for harm, non-inferiority
and success.

Metric values of units are added one by one in a fixed order. Once a test has rejected its null hypothesis, the
rejection is final. The error bound holds for all times together, so decisions may be made at any time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.adaptive_split import Estimate
from headrace_registry.rollouts.metrics import Metric
from headrace_registry.rollouts.plan import Guardrail, ReadingAge, RolloutPlan, Success, UnitReading
from headrace_schemas.events.checkpoint import STATISTICS_MAX
from headrace_statistics import e_process
from headrace_statistics.e_process import Contrast, EProcess, MixtureEProcess, SampleRatio
from headrace_statistics.intervals import ConfidenceSequence, Interval

ARMS = "arms of one size"
"""Name of the requirement that both arms have the same size. It is checked in addition to the plan's guardrails."""
SILENT_UNITS = 30
"""Number of units of each arm after which a metric without any value is ignored; for example, agents without tools have
no tool errors. A metric that has a value for one unit in ten is ignored wrongly in one of 500 rollouts."""

_STATISTICS_MAX = STATISTICS_MAX - 2
"""Largest number of statistics. The decision adds the exposure and the number of the rollout."""


class Wealth(Protocol):
    """An e-process or a mixture of e-processes: the wealth of bets against a null hypothesis."""

    @property
    def log_wealth(self) -> float: ...
    def update(self, value: float) -> None: ...
    def null_rejected(self, error: float) -> bool: ...


@dataclass(slots=True)
class SequentialTest:
    """Sequential test of whether the mean of a metric's contrasts (differences between candidate and control, see
    `MetricMonitor`) exceeds a bound.

    `wealth` is the e-process of the test, and `error` the bound of the probability of a wrong rejection. With `sign` -1
    the contrasts are negated, so that a mean below a bound is detected. `limit` is the bound in the unit of the metric,
    where larger differences are better.
    """

    wealth: Wealth
    error: float
    sign: float = 1.0
    limit: float = 0.0
    null_rejected: bool = False

    def update(self, contrast: float) -> None:
        """Add a contrast, and test whether the null hypothesis is rejected now. A rejection is final."""
        self.wealth.update(self.sign * contrast)
        self.null_rejected = self.null_rejected or self.wealth.null_rejected(self.error)


class MetricMonitor:
    """Contrasts of one metric at one age of the units, and the sequential tests on them.

    In the shadow, a contrast is the difference between two answers to one prompt. On live traffic it is half the
    difference between the arms, so margins are halved, too.
    """

    def __init__(self, metric: Metric, age: ReadingAge, alpha: float) -> None:
        self.metric, self.age = metric, age
        self.scale = (1.0 if age == "shadow" else 0.5) / metric.width
        self.tests: list[SequentialTest] = []
        self.contrasts = EProcess(null=0.0, gap=1.0)
        self.units_with_value = [0, 0]
        """Units with a value of the metric: of the control, of the candidate."""
        self._contrast = Contrast()
        self._sequence = ConfidenceSequence(alpha)

    def harm(self, guardrail: Guardrail, error: float) -> SequentialTest:
        test = SequentialTest(
            MixtureEProcess(guardrail.tolerated * self.scale, guardrail.margin * self.scale),
            error,
            sign=-1.0,
            limit=-guardrail.tolerated,
        )
        self.tests.append(test)
        return test

    def not_inferior(self, margin: float, error: float) -> SequentialTest:
        gap = margin * self.scale
        test = SequentialTest(EProcess(null=-gap, gap=gap), error, limit=-margin)
        self.tests.append(test)
        return test

    def improved(self, margin: float, error: float) -> SequentialTest:
        test = SequentialTest(EProcess(null=0.0, gap=margin * self.scale), error)
        self.tests.append(test)
        return test

    def add_value(self, value: float, *, candidate: bool, expected: float | None = None) -> None:
        self.units_with_value[candidate] += 1
        expected_goodness = None if expected is None else self.metric.goodness(expected)
        self._add_contrast(
            self._contrast.of(self.metric.goodness(value), candidate=candidate, expected=expected_goodness)
        )

    def add_pair(self, candidate: float, champion: float) -> None:
        self._add_contrast(self.metric.goodness(candidate) - self.metric.goodness(champion))

    def _add_contrast(self, contrast: float) -> None:
        self.contrasts.update(contrast)
        self._sequence.update((contrast + 1.0) / 2.0)
        for test in self.tests:
            test.update(contrast)

    def difference(self) -> Interval:
        """Return the confidence interval for candidate minus champion, in the unit of the metric.

        It is valid at all times simultaneously.
        """
        interval = self._sequence.interval()
        ends = [(2.0 * end - 1.0) * self._unit for end in (interval.lower, interval.upper)]
        return Interval(min(ends), max(ends))

    def numbers(self) -> dict[str, float]:
        interval = self.difference()
        numbers = {"difference": self.contrasts.mean * self._unit, "lower": interval.lower, "upper": interval.upper}
        if self.contrasts.standard_error is not None:
            numbers["standard_error"] = self.contrasts.standard_error * abs(self._unit)
        return numbers

    @property
    def _unit(self) -> float:
        return (1.0 if self.metric.higher_is_better else -1.0) / self.scale


@dataclass(frozen=True, slots=True)
class Findings:
    """Summary of a rollout's evidence, from which `state_machine` decides."""

    harmed: tuple[str, ...] = ()
    """Guardrails for which harm was detected, each with the age of the units at which it was detected."""
    open_guardrails: tuple[str, ...] = ()
    """Guardrails for which a loss of their margin is not excluded yet. They include `ARMS` if the sizes of the arms are
    not shown to be equal."""
    successes: tuple[str, ...] = ()
    """Success metrics that were shown to be not inferior or improved, each with this result."""
    improved: bool = False
    """Whether a success metric was shown to be improved."""
    sample_ratio_broken: bool = False
    shadow_units: int = 0
    candidates: int = 0
    """Number of units of the candidate's arm that have reached the age of maturity."""
    controls: int = 0
    statistics: Mapping[str, float] = field(default_factory=dict)
    too_risky: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """For each stage that the candidate must not enter yet, the guardrails for which a large loss is not excluded."""


class Evidence:
    """Evidence about one candidate in comparison with its control.

    `number` counts the candidates that were compared with the same champion or its equals, beginning with 1. The larger
    it is, the smaller is the allowed error.
    """

    def __init__(self, plan: RolloutPlan, number: int = 1) -> None:
        self.plan = plan
        self.alpha = e_process.promotion_error(plan.alpha, number)
        self._monitors: dict[tuple[str, ReadingAge], MetricMonitor] = {}
        self._harms = [
            (
                f"{guardrail.metric} at {age}",
                self._monitor(guardrail, age).harm(guardrail, plan.harm_error(guardrail, age)),
            )
            for guardrail in plan.guardrails
            for age in plan.reading_ages
        ]
        last_age = plan.last_reading_age
        self._safe = [
            (guardrail.metric, self._monitor(guardrail, last_age).not_inferior(guardrail.margin, self.alpha))
            for guardrail in plan.guardrails
        ]
        error = e_process.success_error(plan.alpha, number, len(plan.successes))
        self._successes = [
            (success, self._claim(success, self._monitor(success, last_age), error)) for success in plan.successes
        ]
        if plan.split == "adaptive":
            self._monitor(plan.successes[0], "maturity")
        for name in plan.watched:
            if (name, last_age) not in self._monitors:
                self._monitors[name, last_age] = MetricMonitor(metrics.metric_named(name), last_age, plan.alpha)
        self._entries = {
            stage_index: self._entry_tests(stage.share) for stage_index, stage in enumerate(plan.stages) if stage_index
        }
        self._ratio = SampleRatio()
        self._ratio_broken = False
        self._even = [
            SequentialTest(EProcess(null=-plan.uneven, gap=plan.uneven), self.alpha, sign) for sign in (1.0, -1.0)
        ]
        self._shadow_units = 0
        self._last: dict[ReadingAge, UnitReading] = {}
        self._read: dict[ReadingAge, list[int]] = {age: [0, 0] for age in plan.reading_ages}
        """Units of the control and of the candidate that were read, by age."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics by name whose values a unit must have, as far as they do not abstain."""
        return {name: monitor.metric for (name, _), monitor in self._monitors.items()}

    def monitor(self, metric: str, age: ReadingAge) -> MetricMonitor:
        return self._monitors[metric, age]

    def add_reading(self, age: ReadingAge, reading: UnitReading) -> None:
        """Add the metric values of one unit at one age to the sequential tests.

        Raises:
            ValueError: the unit arrived before the unit that was added last.
        """
        previous = self._last.get(age)
        if previous is not None and reading.unit.order_key <= previous.unit.order_key:
            raise ValueError(
                f"{reading.unit.name} after {previous.unit.name}: units must be added in the order of their arrival"
            )
        self._last[age] = reading
        self._read[age][reading.unit.candidate] += 1
        if age == "maturity":
            self._ratio.update(candidate=reading.unit.candidate)
            self._ratio_broken = self._ratio_broken or self._ratio.ratio_rejected(self.plan.sample_ratio_error)
            for test in self._even:
                test.update(1.0 if reading.unit.candidate else -1.0)
        for (name, monitor_age), monitor in self._monitors.items():
            if monitor_age == age and name in reading.values:
                expected = reading.expected.get(name)
                monitor.add_value(reading.values[name], candidate=reading.unit.candidate, expected=expected)

    def add_shadow_pair(self, candidate: Mapping[str, float], champion: Mapping[str, float]) -> None:
        """Add the metrics of the candidate's and the champion's answer to one prompt of the shadow."""
        self._shadow_units += 1
        for (name, monitor_age), monitor in self._monitors.items():
            if monitor_age == "shadow" and name in candidate and name in champion:
                monitor.add_pair(candidate[name], champion[name])

    def findings(self, *, numbers: bool = True) -> Findings:
        """Summarize the evidence.

        Args:
            numbers: whether to include the statistics, whose computation takes some time.
        """
        successes = [success for success, test in self._successes if test.null_rejected]
        return Findings(
            harmed=tuple(name for name, test in self._harms if test.null_rejected),
            open_guardrails=self._metrics_without_proof(self._safe, self.plan.last_reading_age)
            + (() if all(test.null_rejected for test in self._even) else (ARMS,)),
            successes=tuple(f"{success.metric} {success.kind.replace('_', ' ')}" for success in successes),
            improved=any(success.kind == "improved" for success in successes),
            too_risky={
                stage_index: names
                for stage_index in self._entries
                if (names := self._guardrails_without_proof(stage_index))
            },
            sample_ratio_broken=self._ratio_broken,
            shadow_units=self._shadow_units,
            candidates=self._ratio.candidates,
            controls=self._ratio.controls,
            statistics=self.statistics() if numbers else {},
        )

    @property
    def measured(self) -> int:
        """Number of units for which a success metric has a value, in the smaller one of both arms."""
        successes = {success.metric for success, _ in self._successes}
        return max(min(monitor.units_with_value) for (name, _), monitor in self._monitors.items() if name in successes)

    @property
    def units(self) -> int:
        """Number of units in both arms whose last metric values were computed."""
        return self._ratio.candidates + self._ratio.controls

    def estimate(self) -> Estimate:
        """Return the estimated advantage of the candidate in the first success metric, with its standard error, as a
        fraction of the metric's range. A larger value is better."""
        success, _ = self._successes[0]
        monitor = self._monitors[success.metric, "maturity"]
        error = monitor.contrasts.standard_error
        return Estimate(2.0 * monitor.contrasts.mean, None if error is None else 2.0 * error)

    def statistics(self) -> dict[str, float]:
        """Return the numbers that explain a decision about the rollout, by name: error limits, numbers of units, and
        the state of the tests of each metric.

        A metric is computed for each unit at one or two ages. If harm was detected, the numbers are those of the age at
        which it was detected first, else those of the last age, on which promotions depend. `METRIC.harm_log_wealth` is
        the evidence for harm. Harm is detected when it reaches -ln of the test's allowed error.

        The limits are those of the rules that refuse the candidate or do not promote it yet. `METRIC.harm_limit` is the
        difference that the candidate has fallen behind, `METRIC.limit` the one that a guardrail must exclude,
        `METRIC.success_limit` the one that a success must exceed, and `METRIC.stage_2_limit` the one that must be
        excluded before stage 2. Of too many numbers for one event, the last ones, which are standard errors, are left
        out.
        """
        numbers = {
            "alpha": self.alpha,
            "beta": self.plan.beta,
            "candidate_units": float(self._ratio.candidates),
            "control_units": float(self._ratio.controls),
            "sample_ratio_log_evidence": self._ratio.log_evidence,
            **self._limits(),
        }
        errors: dict[str, float] = {}
        if self._shadow_units:
            numbers["shadow_units"] = float(self._shadow_units)
        ages: tuple[ReadingAge, ...] = ("maturity", "closing", "shadow")
        if not any(test.null_rejected for _, test in self._harms):
            ages = (self.plan.last_reading_age, *ages)
        for name in self.metrics:
            monitors = [
                monitor for age in ages if (monitor := self._monitors.get((name, age))) and monitor.contrasts.count
            ]
            if monitors:
                values = monitors[0].numbers()
                if (error := values.pop("standard_error", None)) is not None:
                    errors[f"{name}.standard_error"] = error
                numbers |= {f"{name}.{key}": value for key, value in values.items()}
        for guardrail in self.plan.guardrails:
            tests = [test for name, test in self._harms if name.rpartition(" at ")[0] == guardrail.metric]
            numbers[f"{guardrail.metric}.harm_log_wealth"] = max(test.wealth.log_wealth for test in tests)
        return dict(itertools.islice((numbers | errors).items(), _STATISTICS_MAX))

    def _limits(self) -> dict[str, float]:
        """Return the limits that `statistics` describes, in the direction of the differences."""
        tests = [(f"{name.rpartition(' at ')[0]}.harm_limit", test) for name, test in self._harms if test.null_rejected]
        tests += [(f"{name}.limit", test) for name, test in self._safe if not test.null_rejected]
        if not any(test.null_rejected for _, test in self._successes):
            tests += [(f"{success.metric}.success_limit", test) for success, test in self._successes]
        for stage_index, entries in self._entries.items():
            unproven = [(name, test) for name, test in entries if not test.null_rejected]
            tests += [(f"{name}.stage_{stage_index + 1}_limit", test) for name, test in unproven]
            if unproven:
                break
        limits = {"sample_ratio_log_limit": -math.log(self.plan.sample_ratio_error)} if self._ratio_broken else {}
        if not all(test.null_rejected for test in self._even):
            limits["uneven_limit"] = self.plan.uneven
        metrics_by_name = self.metrics
        for name, test in tests:
            higher_is_better = metrics_by_name[name.rpartition(".")[0]].higher_is_better
            limits[name] = (test.limit if higher_is_better else -test.limit) or 0.0
        return limits

    def _entry_tests(self, share: Fraction) -> list[tuple[str, SequentialTest]]:
        """Return the tests that must have rejected a large loss before the candidate gets the traffic share `share`.
        They use the values at the age of maturity."""
        loss = self.plan.loss_to_rule_out(min(share, Fraction(1, self.plan.slots + 1)))
        if loss is None:
            return []
        return [
            (
                guardrail.metric,
                self._monitor(guardrail, "maturity").not_inferior(
                    float(loss) * guardrail.measured.width, self.plan.alpha
                ),
            )
            for guardrail in self.plan.guardrails
        ]

    def _guardrails_without_proof(self, stage_index: int) -> tuple[str, ...]:
        """Return the guardrails for which the large loss that the stage would risk is not excluded yet."""
        return self._metrics_without_proof(self._entries[stage_index], "maturity")

    def _metrics_without_proof(self, tests: Iterable[tuple[str, SequentialTest]], age: ReadingAge) -> tuple[str, ...]:
        """Return the metrics whose test has not rejected its null hypothesis. Metrics without any value after enough
        units are ignored."""
        enough = min(self._read[age]) >= SILENT_UNITS
        silent = {name for name, _ in tests if enough and self._monitors[name, age].contrasts.count == 0}
        return tuple(name for name, test in tests if not test.null_rejected and name not in silent)

    def _monitor(self, rule: Guardrail | Success, age: ReadingAge) -> MetricMonitor:
        return self._monitors.setdefault((rule.metric, age), MetricMonitor(rule.measured, age, self.plan.alpha))

    @staticmethod
    def _claim(success: Success, monitor: MetricMonitor, error: float) -> SequentialTest:
        test = monitor.improved if success.kind == "improved" else monitor.not_inferior
        return test(success.margin, error)
