"""What the units of one rollout show so far: e-processes for harm, for non-inferiority and for success.

Readings are taken one by one in their order. What an e-process has once been convinced of stays: the bound is on ever,
so a decision does not depend on when somebody looked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from headrace_registry import spending
from headrace_registry.e_process import EProcess
from headrace_registry.rollouts import confidence, metrics
from headrace_registry.rollouts.adapting import Estimate
from headrace_registry.rollouts.contrast import Contrast
from headrace_registry.rollouts.hedge import Hedge
from headrace_registry.rollouts.maturity import UnitReading
from headrace_registry.rollouts.metrics import Metric
from headrace_registry.rollouts.plan import Guardrail, Look, RolloutPlan, Success
from headrace_registry.rollouts.sample_ratio import SampleRatio

ARMS = "arms of one size"
"""What has to be shown beside the plan's guardrails."""
SILENT_UNITS = 30
"""Units of each arm after which a metric that all of them abstained from has nothing to say of this agent: agents
without tools make no tool errors. What one unit in ten speaks of is taken for silent once in 500 rollouts."""


class Wealth(Protocol):
    """A gambler, or several with common money."""

    @property
    def log_wealth(self) -> float: ...
    def see(self, value: float) -> None: ...
    def convinced(self, error: float) -> bool: ...


@dataclass(slots=True)
class Test:
    """One e-process with the error that it may make. `sign` -1: it bets on differences downwards."""

    wealth: Wealth
    error: float
    sign: float = 1.0
    convinced: bool = False

    def see(self, contrast: float) -> None:
        self.wealth.see(self.sign * contrast)
        self.convinced = self.convinced or self.wealth.convinced(self.error)


class MetricWatch:
    """One metric at one look: its contrast, and the tests that look at it. In the shadow a contrast is a difference of
    two answers to one prompt; else half the difference of the arms, so margins are halved too."""

    def __init__(self, metric: Metric, look: Look, alpha: float) -> None:
        self.metric, self.look = metric, look
        self.scale = (1.0 if look == "shadow" else 0.5) / metric.width
        self.tests: list[Test] = []
        self.seen = EProcess(null=0.0, gap=1.0)
        self.said = [0, 0]
        """Units that said something: of the control, of the candidate."""
        self._contrast = Contrast()
        self._sequence = confidence.ConfidenceSequence(alpha)

    def harm(self, guardrail: Guardrail, error: float) -> Test:
        test = Test(Hedge(guardrail.tolerated * self.scale, guardrail.margin * self.scale), error, sign=-1.0)
        self.tests.append(test)
        return test

    def not_inferior(self, margin: float, error: float) -> Test:
        gap = margin * self.scale
        test = Test(EProcess(null=-gap, gap=gap), error)
        self.tests.append(test)
        return test

    def improved(self, margin: float, error: float) -> Test:
        test = Test(EProcess(null=0.0, gap=margin * self.scale), error)
        self.tests.append(test)
        return test

    def take(self, value: float, *, candidate: bool, expected: float | None = None) -> None:
        self.said[candidate] += 1
        foretold = None if expected is None else self.metric.goodness(expected)
        self._see(self._contrast.of(self.metric.goodness(value), candidate=candidate, expected=foretold))

    def take_pair(self, candidate: float, champion: float) -> None:
        self._see(self.metric.goodness(candidate) - self.metric.goodness(champion))

    def _see(self, contrast: float) -> None:
        self.seen.see(contrast)
        self._sequence.see((contrast + 1.0) / 2.0)
        for test in self.tests:
            test.see(contrast)

    def difference(self) -> confidence.Interval:
        """Candidate less champion, in the metric's own unit and direction, at this moment; valid at all of them."""
        found = self._sequence.interval()
        ends = [(2.0 * end - 1.0) * self._unit for end in (found.lower, found.upper)]
        return confidence.Interval(min(ends), max(ends))

    def numbers(self) -> dict[str, float]:
        found = self.difference()
        numbers = {"difference": self.seen.mean * self._unit, "lower": found.lower, "upper": found.upper}
        if self.seen.standard_error is not None:
            numbers["standard_error"] = self.seen.standard_error * abs(self._unit)
        return numbers

    @property
    def _unit(self) -> float:
        return (1.0 if self.metric.higher_is_better else -1.0) / self.scale


@dataclass(frozen=True, slots=True)
class Findings:
    """What the rule of `machine` looks at."""

    harmed: tuple[str, ...] = ()
    """Guardrails, each with the look that found it."""
    open_guardrails: tuple[str, ...] = ()
    """Those not shown to be less than their margin worse, and `ARMS`."""
    shown: tuple[str, ...] = ()
    """Success metrics, each with what was shown."""
    improved: bool = False
    """Whether one of these is an improvement."""
    sample_ratio_broken: bool = False
    shadow_units: int = 0
    candidates: int = 0
    """Mature units of the candidate's arm."""
    controls: int = 0
    statistics: Mapping[str, float] = field(default_factory=dict)
    too_risky: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Stages that the candidate may not come into yet, each with the guardrails that still have to be shown to lose
    less than the plan allows at its share."""


class Evidence:
    """Of one candidate against its control. `number`: its place in the family, from 1."""

    def __init__(self, plan: RolloutPlan, number: int = 1) -> None:
        self.plan = plan
        self.alpha = spending.promotion(plan.alpha, number)
        self._watches: dict[tuple[str, Look], MetricWatch] = {}
        self._harms = [
            (f"{one.metric} at {look}", self._watch(one, look).harm(one, plan.harm_error(one, look)))
            for one in plan.guardrails
            for look in plan.looks
        ]
        last = plan.last_look
        self._safe = [
            (one.metric, self._watch(one, last).not_inferior(one.margin, self.alpha)) for one in plan.guardrails
        ]
        error = spending.success(plan.alpha, number, len(plan.successes))
        self._successes = [(one, self._claim(one, self._watch(one, last), error)) for one in plan.successes]
        if plan.split == "adaptive":
            self._watch(plan.successes[0], "maturity")
        for name in plan.watched:
            if (name, last) not in self._watches:
                self._watches[name, last] = MetricWatch(metrics.named(name), last, plan.alpha)
        self._entries = {place: self._to_enter(stage.share) for place, stage in enumerate(plan.stages) if place}
        self._ratio = SampleRatio()
        self._ratio_broken = False
        self._even = [Test(EProcess(null=-plan.uneven, gap=plan.uneven), self.alpha, sign) for sign in (1.0, -1.0)]
        self._shadow_units = 0
        self._last: dict[Look, UnitReading] = {}
        self._read: dict[Look, list[int]] = {look: [0, 0] for look in plan.looks}
        """Units of the control and of the candidate."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """What a reading has to hold."""
        return {name: watch.metric for (name, _), watch in self._watches.items()}

    def watch(self, metric: str, look: Look) -> MetricWatch:
        return self._watches[metric, look]

    def take(self, look: Look, reading: UnitReading) -> None:
        """The next unit at that look. Raises `ValueError` when it is not behind the one before."""
        before = self._last.get(look)
        if before is not None and reading.unit.place <= before.unit.place:
            raise ValueError(
                f"{reading.unit.name} after {before.unit.name}: units are read in the order of their arrival"
            )
        self._last[look] = reading
        self._read[look][reading.unit.candidate] += 1
        if look == "maturity":
            self._ratio.see(candidate=reading.unit.candidate)
            self._ratio_broken = self._ratio_broken or self._ratio.broken(self.plan.sample_ratio_error)
            for test in self._even:
                test.see(1.0 if reading.unit.candidate else -1.0)
        for (name, at), watch in self._watches.items():
            if at == look and name in reading.values:
                expected = reading.expected.get(name)
                watch.take(reading.values[name], candidate=reading.unit.candidate, expected=expected)

    def take_shadow(self, candidate: Mapping[str, float], champion: Mapping[str, float]) -> None:
        """Both answers to one prompt."""
        self._shadow_units += 1
        for (name, at), watch in self._watches.items():
            if at == "shadow" and name in candidate and name in champion:
                watch.take_pair(candidate[name], champion[name])

    def findings(self, *, numbers: bool = True) -> Findings:
        """`numbers`: with statistics, which take a moment."""
        shown = [one for one, test in self._successes if test.convinced]
        return Findings(
            harmed=tuple(name for name, test in self._harms if test.convinced),
            open_guardrails=self._open(self._safe, self.plan.last_look)
            + (() if all(test.convinced for test in self._even) else (ARMS,)),
            shown=tuple(f"{one.metric} {one.kind.replace('_', ' ')}" for one in shown),
            improved=any(one.kind == "improved" for one in shown),
            too_risky={place: names for place in self._entries if (names := self._not_shown(place))},
            sample_ratio_broken=self._ratio_broken,
            shadow_units=self._shadow_units,
            candidates=self._ratio.candidates,
            controls=self._ratio.controls,
            statistics=self.statistics() if numbers else {},
        )

    @property
    def measured(self) -> int:
        """Units of the arm that said less, of those whose reading said something of a success metric."""
        successes = {success.metric for success, _ in self._successes}
        return max(min(watch.said) for (name, _), watch in self._watches.items() if name in successes)

    @property
    def units(self) -> int:
        """Read at maturity, of both arms."""
        return self._ratio.candidates + self._ratio.controls

    def estimate(self) -> Estimate:
        """Of the first success metric, as a share of its width, more being better."""
        success, _ = self._successes[0]
        watch = self._watches[success.metric, "maturity"]
        error = watch.seen.standard_error
        return Estimate(2.0 * watch.seen.mean, None if error is None else 2.0 * error)

    def statistics(self) -> dict[str, float]:
        """Of the whole, and of each metric: as first read when there is harm, else as read last, which promotions rest
        on. A guardrail's evidence for harm is the log of a wealth; its tests need -ln of their errors."""
        found = {
            "alpha": self.alpha,
            "beta": self.plan.beta,
            "candidate_units": float(self._ratio.candidates),
            "control_units": float(self._ratio.controls),
            "sample_ratio_log_evidence": self._ratio.log_evidence,
        }
        if self._shadow_units:
            found["shadow_units"] = float(self._shadow_units)
        first: tuple[Look, ...] = ("maturity", "closing", "shadow")
        if not any(test.convinced for _, test in self._harms):
            first = (self.plan.last_look, *first)
        for name in self.metrics:
            seen = [watch for look in first if (watch := self._watches.get((name, look))) and watch.seen.count]
            if seen:
                found |= {f"{name}.{key}": value for key, value in seen[0].numbers().items()}
        for guardrail in self.plan.guardrails:
            tests = [test for name, test in self._harms if name.rpartition(" at ")[0] == guardrail.metric]
            found[f"{guardrail.metric}.harm_log_wealth"] = max(test.wealth.log_wealth for test in tests)
        return found

    def _to_enter(self, share: Fraction) -> list[tuple[str, Test]]:
        """What has to be shown at the first reading on live traffic before the candidate gets that share."""
        part = self.plan.to_rule_out(min(share, Fraction(1, self.plan.slots + 1)))
        if part is None:
            return []
        return [
            (one.metric, self._watch(one, "maturity").not_inferior(float(part) * one.measured.width, self.plan.alpha))
            for one in self.plan.guardrails
        ]

    def _not_shown(self, place: int) -> tuple[str, ...]:
        return self._open(self._entries[place], "maturity")

    def _open(self, tests: Iterable[tuple[str, Test]], look: Look) -> tuple[str, ...]:
        """The metrics of which something is still to be shown."""
        enough = min(self._read[look]) >= SILENT_UNITS
        silent = {name for name, _ in tests if enough and self._watches[name, look].seen.count == 0}
        return tuple(name for name, test in tests if not test.convinced and name not in silent)

    def _watch(self, one: Guardrail | Success, look: Look) -> MetricWatch:
        return self._watches.setdefault((one.metric, look), MetricWatch(one.measured, look, self.plan.alpha))

    @staticmethod
    def _claim(success: Success, watch: MetricWatch, error: float) -> Test:
        test = watch.improved if success.kind == "improved" else watch.not_inferior
        return test(success.margin, error)
