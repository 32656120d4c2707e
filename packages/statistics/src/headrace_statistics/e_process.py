"""E-processes, tests that may be stopped at any time, and alpha spending: how a family of versions shares the
probability of an error.

`EProcess`: against the null hypothesis "the mean is at most `null`".

Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting" (JRSS-B 2023, arXiv 2010.09686),
section 4: before each x in [-1, 1] is observed, a gambler with one unit of money stakes λ ≥ 0 on "x is larger than
null". The wealth, their capital process,

    K_t = Π_{i ≤ t} (1 + λ_i (x_i - null)),

is a non-negative supermartingale as long as E[x_i | past] ≤ null, for every distribution. Hence P(sup_t K_t ≥ 1/α) ≤ α
(Ville's inequality, their section 2). The error bound needs nothing else: the choice of λ decides only how soon the
evidence suffices.

`MixtureEProcess`: several gamblers share one unit of money, each expects another effect, and one is about right.

The sum of their wealth is again a non-negative supermartingale that begins with 1, so the bound of `EProcess` holds for
it (diversified bets: Waudby-Smith & Ramdas 2023, section 5). A gambler who expects a small effect bets too little on a
disaster; one who expects a disaster loses on a small effect.

`SampleRatio` tests whether the arms have the planned sizes. If not, units were lost or counted twice, and no difference
means much.

Lindon & Malek, "Anytime-valid inference for multinomial count data" (NeurIPS 2022, arXiv 2011.03567): the Bayes factor
of a multinomial with a Dirichlet prior against the planned probabilities. With each unit it grows by the factor q(arm)
/ p(arm), where p is planned and q = (κ p + units of that arm so far) / (κ + units so far). Σ p · q/p = 1, so it is a
martingale from 1 when p is right, and P(it ever reaches 1/α) ≤ α. p may change with every unit.

A family is all versions that are compared with the same anchor. The k-th one may be promoted wrongly with probability
α_k at most, and Σ α_k ≤ α without an end to k: Bonferroni with unequal shares (alpha spending as in Foster & Stine
2008, without earning any back). The shares 1/(k(k+1)) = 1/k - 1/(k+1) telescope to 1, and the k-th version pays for
its place with about 2 ln k more evidence.

`Contrast` turns two arms into one sequence of numbers in [-1, 1] whose mean is half the difference of the arms.

A unit of the comparison is in the candidate's arm (A = 1) or the control's (A = 0) with probability 1/2, whatever came
before. With the value y in [0, 1] and any number c that was known before, x = (2A - 1)(y - c) has

    E[x | past] = (E[y | candidate] - E[y | control]) / 2,

which is the estimate by inverse propensity, halved and centred (Horvitz & Thompson 1952; for sequences Howard, Ramdas,
McAuliffe & Sekhon, Ann. Statist. 2021). It holds unit by unit: effects of the hour of the day on both arms cancel,
because the control is concurrent. No pairs are formed, so no arm waits for the other. `c` is the mean of all earlier
units, or their prediction for a unit with this expectation (`Regression`); it only reduces variance.

`Regression` of a unit's value on a number that was known beforehand, fitted to the units so far, works as CUPED does
(Deng, Xu, Kohavi & Walker, "Improving the sensitivity of online controlled experiments by utilizing pre-experiment
data", WSDM 2013): the share of the variance that the line explains is removed. Here the line is fitted to the earlier
units of both arms together. Its prediction of the next unit is therefore known before that unit's arm is, and
`Contrast` stays fair however wrong the prediction is. The line begins as "the value is what was expected".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_FOR_PROMOTIONS = 0.8
"""Share of α for wrong promotions. The rest is for wrongly declaring a version better than the anchor
(`succession_error`)."""


@dataclass(slots=True)
class EProcess:
    """E-process against the null hypothesis "the mean is at most `null`", updated with one value in [-1, 1] at a time.

    `gap` is the effect to detect: stakes are optimal (Kelly) for a mean of `null + gap`, and larger when the data
    suggest a larger mean. `stake_max` is the largest share of the wealth that one value can cost; Waudby-Smith & Ramdas
    (2023) call it `c` and suggest 1/2 or 3/4. If values vary little, a larger share rejects the hypothesis sooner.
    """

    null: float
    gap: float
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean (Welford's recurrence)."""
    log_wealth: float = 0.0
    stake_max: float = 0.5

    def stake(self) -> float:
        """Return the stake λ on the next value, computed from the earlier values alone.

        This is the "approximate GRAPA" bet of Waudby-Smith & Ramdas (2023), which maximises the expected growth of the
        log wealth to second order: (mean - null) / (variance + (mean - null)²). The estimates of mean and variance
        begin with one imaginary value at `null + gap` with variance 1. A standard error is subtracted from the
        estimated mean - null, so that early luck does not raise the stake.
        """
        weight = self.count + 1
        variance = (1.0 + self.squares) / weight
        expected = (self.total + self.null + self.gap) / weight
        advantage = max(self.gap, expected - self.null - math.sqrt(variance / weight))
        best = advantage / (variance + advantage * advantage)
        return min(best, self.stake_max / (1.0 + self.null)) if self.null > -1.0 else best

    def update(self, value: float) -> None:
        """Add one value of [-1, 1]."""
        self.log_wealth += math.log1p(self.stake() * (value - self.null))
        before = self.mean
        self.count += 1
        self.total += value
        self.squares += (value - before) * (value - self.total / self.count)

    def null_rejected(self, error: float) -> bool:
        """Return whether the null hypothesis is rejected. Over all time, the probability of a wrong rejection is at
        most `error`."""
        return self.log_wealth >= -math.log(error)

    @property
    def mean(self) -> float:
        """Mean of the values; 0 before the first value."""
        return self.total / self.count if self.count else 0.0

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean, or None for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None


PARTS = ((1.0, 2.0 / 3.0), (2.0, 1.0 / 3.0))
"""For each gambler: the effect that it expects, as a multiple of `gap`, and its part of the money."""


class MixtureEProcess:
    """Mixture of e-processes against "the mean is at most `null`", for values in [-1, 1].

    `gap` is the effect to detect. Each component e-process bets on its own multiple of `gap` (`PARTS`).
    """

    def __init__(self, null: float, gap: float) -> None:
        self._gamblers = [(EProcess(null=null, gap=times * gap), math.log(part)) for times, part in PARTS]

    def update(self, value: float) -> None:
        for gambler, _ in self._gamblers:
            gambler.update(value)

    @property
    def log_wealth(self) -> float:
        logs = [log_part + gambler.log_wealth for gambler, log_part in self._gamblers]
        largest = max(logs)
        return largest + math.log(math.fsum(math.exp(log_wealth_part - largest) for log_wealth_part in logs))

    def null_rejected(self, error: float) -> bool:
        return self.log_wealth >= -math.log(error)


_STRENGTH = 100.0
"""κ: the number of units that the plan is worth. A larger κ detects small faults sooner, a smaller κ large ones."""


@dataclass(slots=True)
class SampleRatio:
    """Counts of the units in two arms, and the log e-value against the planned ratio of the arms."""

    candidates: int = 0
    controls: int = 0
    log_evidence: float = 0.0

    def update(self, *, candidate: bool, planned: float = 0.5) -> None:
        """Add one unit, for which the candidate's arm was planned to have the probability `planned`."""
        arm, probability = (self.candidates, planned) if candidate else (self.controls, 1.0 - planned)
        expected = (_STRENGTH * probability + arm) / (_STRENGTH + self.candidates + self.controls)
        self.log_evidence += math.log(expected / probability)
        if candidate:
            self.candidates += 1
        else:
            self.controls += 1

    def ratio_rejected(self, error: float) -> bool:
        """Return whether the observed counts contradict the planned shares of the two arms. However often it is called,
        the probability of a wrong rejection is at most `error`.
        """
        return self.log_evidence >= -math.log(error)


def promotion_error(alpha: float, number: int) -> float:
    """Return the allowed error probability of promoting a version wrongly.

    `number` counts the versions, from 1, that are compared with the same anchor (gate) or champion (rollouts).
    """
    return _FOR_PROMOTIONS * alpha * _share(number)


def succession_error(alpha: float, number: int) -> float:
    """Return the allowed error probability of replacing the anchor by a version that is not better than the anchor.

    The anchor is the version that candidates must not fall behind. `number` counts the versions, from 1, that are
    compared with the same anchor.
    """
    return (1.0 - _FOR_PROMOTIONS) * alpha * _share(number)


def refusal_error(beta: float, opponents: int) -> float:
    """Return the error probability of one test that may refuse a version although it equals the opponent.

    The tests against all opponents share half of `beta`. The other half is for versions that are refused because
    their trial is undecided after `tasks_max` tasks.
    """
    return beta / 2.0 / opponents


def success_error(alpha: float, number: int, metrics: int) -> float:
    """Return the error probability of the test of one success metric of a rollout.

    A success in any metric is enough for a promotion, so the metrics share `promotion_error(alpha, number)` equally.
    """
    return promotion_error(alpha, number) / metrics


def harm_error(beta: float, share: float) -> float:
    """Return the error probability of one test for harm, which may wrongly roll back a harmless version.

    It is the test's `share` of `beta`. The shares of all tests for harm add up to 1, because a rollout without a
    result in time is held and not rolled back.
    """
    return beta * share


def _share(number: int) -> float:
    return 1.0 / (number * (number + 1))


_BELIEF = 1.0
"""Weight of the slope's prior value, 1: it counts as so much `Regression.spread` of earlier units."""


@dataclass(slots=True)
class Regression:
    """Linear regression of units' values on their expected values, both in [0, 1], with a prior slope of 1.

    `spread` is the sum of squared deviations of the expected values from their mean, `joint` that of the products of
    the deviations of expected values and values.
    """

    count: int = 0
    value_mean: float = 0.0
    expected_mean: float = 0.0
    spread: float = 0.0
    joint: float = 0.0

    def predict(self, expected: float) -> float:
        """Return the predicted value, in [0, 1], of the next unit with this expected value.

        The means begin with one imaginary unit at 1/2.
        """
        slope = (self.joint + _BELIEF) / (self.spread + _BELIEF)
        level = (self.value_mean * self.count + 0.5) / (self.count + 1)
        centre = (self.expected_mean * self.count + 0.5) / (self.count + 1)
        return min(1.0, max(0.0, level + slope * (expected - centre)))

    def update(self, expected: float, value: float) -> None:
        """Add the next unit (Welford's recurrence)."""
        self.count += 1
        off = expected - self.expected_mean
        self.expected_mean += off / self.count
        self.value_mean += (value - self.value_mean) / self.count
        self.spread += off * (expected - self.expected_mean)
        self.joint += off * (value - self.value_mean)


@dataclass(slots=True)
class Contrast:
    """Converter of a sequence of units in two arms to numbers x whose mean is half the difference of the arms.

    `count` and `total` are those of the earlier units' values. Their mean, with one imaginary value of 1/2, is the
    centre c of a unit without an expected value.
    """

    count: int = 0
    total: float = 0.0
    regression: Regression = field(default_factory=Regression)

    def of(self, value: float, *, candidate: bool, expected: float | None = None) -> float:
        """Return the centred value x of the next unit, and add the unit to the earlier ones.

        Args:
            value: the unit's value in [0, 1]; larger is better.
            candidate: whether the unit is in the candidate's arm rather than the control's.
            expected: the value that was expected before the unit's arm was known, or None.
        """
        if expected is None:
            centre = (self.total + 0.5) / (self.count + 1)
        else:
            centre = self.regression.predict(expected)
            self.regression.update(expected, value)
        self.count += 1
        self.total += value
        return value - centre if candidate else centre - value
