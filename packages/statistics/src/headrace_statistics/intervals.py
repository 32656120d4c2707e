"""Confidence intervals of a mean, for one time and for all times, and means over seeds and tasks with their errors.

`ConfidenceSequence`: intervals for all times that contain the mean at all of them together with probability 1 - α.

The hedged capital confidence sequence of Waudby-Smith & Ramdas, "Estimating means of bounded random variables by
betting" (JRSS-B 2023, arXiv 2010.09686), Theorem 3 with θ = 1/2 and c = 1/2, for values z in [0, 1]:

    K⁺_t(m) = Π (1 + min(λ_i, c/m) (z_i - m)),    K⁻_t(m) = Π (1 - min(λ_i, c/(1-m)) (z_i - m)),
    {m : max(K⁺_t(m), K⁻_t(m)) / 2 < 1/α},
    λ_t = √(2 ln(2/α) / (σ̂²_{t-1} t ln(1+t))),  μ̂_t = (1/2 + Σ z_i)/(t+1),  σ̂²_t = (1/4 + Σ (z_i - μ̂_i)²)/(t+1).

K⁺ falls and K⁻ rises with m, so the set is an interval, and bisection finds its ends.

`quantile` is the exact quantile of Student's t distribution, without dependencies. With t = √ν sinh v, the upper tail
is an integral of a smooth, log-concave function, for every number of degrees of freedom ν:

    P(T > t) = C ∫_v^∞ (cosh w)^-ν dw,   C = Γ((ν + 1)/2) / (√π Γ(ν/2)).

It is computed by the double-exponential rule for a half line (Takahasi & Mori, "Double exponential formulas for
numerical integration", Publ. RIMS 9, 1974), and inverted by Newton's method on the logarithm of the tail, which is
concave in v: the method converges from every start. Both keep 12 digits or more from P = 1e-300 to P = 1/2.

Means over seeds and tasks: compared versions have played the same tasks with the same seeds, so the differences of
single plays are averaged. The error *over seeds* is the standard deviation of the means of the seeds divided by √seeds.
The error *over tasks* treats the seeds as fixed and the tasks, which are clusters of plays, as drawn at random.

- If each seed has its own tasks, the error over seeds includes the variation of tasks, but with few seeds it is a rough
  estimate and sometimes too small. The larger of both errors is used.
- If the seeds share their tasks, the error over seeds does not include tasks, and the error over tasks does not include
  seeds. The squares of both are added.

With one seed only the error over tasks is available.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, stdev

_TRUNCATION = 0.5
_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed confidence interval. Bisection finds its ends, so it is slightly too wide and never too narrow."""

    lower: float
    upper: float


@dataclass(slots=True)
class ConfidenceSequence:
    """Confidence sequence of the mean of values in [0, 1]: the values so far with the bets on them.

    `alpha` is the error probability of both ends and all times together.
    """

    alpha: float
    _values: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of z and λ."""
    _total: float = 0.5
    _squares: float = 0.25

    def update(self, value: float) -> None:
        """Add one value of [0, 1]."""
        time = len(self._values) + 1
        variance = self._squares / time
        bet = math.sqrt(2.0 * math.log(2.0 / self.alpha) / (variance * time * math.log1p(time)))
        self._values.append((value, bet))
        self._total += value
        self._squares += (value - self._total / (time + 1)) ** 2

    def interval(self) -> Interval:
        """Return the confidence interval after the values observed so far."""
        limit = math.log(2.0 / self.alpha)
        lower = _crossing(lambda mean: self._from_below(mean) < limit)
        upper = 1.0 - _crossing(lambda rest: self._from_above(1.0 - rest) < limit)
        return Interval(lower, upper)

    def _from_below(self, mean: float) -> float:
        """Return ln K⁺(`mean`), which is large if the values are above `mean`."""
        most = _TRUNCATION / mean if mean > 0.0 else math.inf
        return math.fsum(math.log1p(min(bet, most) * (value - mean)) for value, bet in self._values)

    def _from_above(self, mean: float) -> float:
        """Return ln K⁻(`mean`), which is large if the values are below `mean`."""
        most = _TRUNCATION / (1.0 - mean) if mean < 1.0 else math.inf
        return math.fsum(math.log1p(-min(bet, most) * (value - mean)) for value, bet in self._values)


def _crossing(inside: Callable[[float], bool]) -> float:
    """Find by bisection the left end of an interval in [0, 1]: a number just below it that is outside, or 0.

    Args:
        inside: returns whether a number may be in the interval.
    """
    if inside(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if inside(middle) else (middle, high)
    return low


Z = 1.959963984540054
"""Quantile of the standard normal distribution for a two-sided interval of 95 %."""


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the confidence interval of a mean, or None if there are too few values.

    For shares (all values are 0 or 1), it is Wilson's interval, which also holds if all values are equal. For other
    values, it is the mean plus and minus Student's t times the standard error, which needs two values.
    """
    if not values:
        return None
    z, count = statistics.NormalDist().inv_cdf(0.5 + confidence / 2), len(values)
    if all(value in (0.0, 1.0) for value in values):
        return wilson(math.fsum(values), count, z)
    if count < 2:
        return None
    margin = mean_margin(values, 0.5 + confidence / 2)
    mean = statistics.fmean(values)
    return mean - margin, mean + margin


def wilson(successes: float, count: int, z: float = Z) -> tuple[float, float]:
    """Return the score interval of a share (Wilson 1927), which also holds for small counts and for shares of 0 and
    1."""
    share, squared = successes / count, z * z
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = z / (1 + squared / count) * math.sqrt(share * (1 - share) / count + squared / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


FREEDOM_MIN = 0.1
_NORMAL = 1e18
"""Degrees of freedom from which on the distribution is normal to all digits of a float."""
_CENTRAL = 0.25
"""Probabilities nearer to 1/2 are computed from the centre, because a difference from 1/2 would lose digits."""
_NEWTON_STEPS_MAX = 100
_TOLERANCE = 1e-10
"""Relative step at which Newton's method stops. Its quadratic convergence makes the remaining error negligible."""
_STIRLING = (-1 / 8, 1 / 192, -1 / 640, 17 / 14336, -31 / 18432, 691 / 180224)
_STIRLING_MIN = 20.0
"""Coefficients of ln Γ(x + 1/2) - ln Γ(x) - ln(x)/2 in odd powers of 1/x, and the least x that they are used for."""
_STEP = 1 / 16
_NODES = tuple(
    (math.exp(math.pi / 2 * math.sinh(k * _STEP)), math.pi / 2 * math.cosh(k * _STEP) * _STEP) for k in range(-66, 62)
)
"""Abscissas of the rule for the half line, and the weight of each relative to its abscissa."""


@lru_cache(maxsize=1024)
def quantile(probability: float, freedom: float) -> float:
    """Return the value below which Student's t lies with `probability`.

    Args:
        probability: from 0 to 1. For 0 and 1 the quantile is infinite.
        freedom: the degrees of freedom, at least `FREEDOM_MIN`, or infinity for the normal distribution.

    Raises:
        ValueError: an argument is outside its range.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability = {probability:g}: must be from 0 to 1")
    if not freedom >= FREEDOM_MIN:
        raise ValueError(f"freedom = {freedom:g}: must be {FREEDOM_MIN:g} or more")
    freedom = min(freedom, _NORMAL)
    if probability < 0.5:
        return -_upper_quantile(probability, 0.5 - probability, freedom)
    return _upper_quantile(1 - probability, probability - 0.5, freedom)


def lower_bound(values: Sequence[float], level: float) -> float:
    """Return the one-sided lower confidence bound (Student's t) of a mean, with error probability `level`.

    It is minus infinity for fewer than two values.
    """
    return fmean(values) - mean_margin(values, 1 - level) if values else -math.inf


def mean_margin(values: Sequence[float], probability: float) -> float:
    """Return Student's t quantile at `probability` times the standard error of the mean of independent values.

    It is infinite for fewer than two values.
    """
    count = len(values)
    if count < 2:
        return math.inf
    return quantile(probability, count - 1) * stdev(values) / math.sqrt(count)


def _upper_quantile(tail: float, centre: float, freedom: float) -> float:
    """Return t for P(T > t) = `tail` and P(0 < T < t) = `centre`."""
    if tail == 0:
        return math.inf
    constant = _constant(freedom)
    v = 0.0
    for _ in range(_NEWTON_STEPS_MAX):
        density = constant * math.exp(-freedom * _log_cosh(v))
        ratio = _tail_ratio(v, freedom)
        if centre < _CENTRAL and v < 1:
            step = (centre - constant * _central_integral(v, freedom)) / density
        else:
            step = ratio * (math.log(constant * ratio) - freedom * _log_cosh(v) - math.log(tail))
        v = max(0.0, v + step)
        if abs(step) <= _TOLERANCE * v:
            break
    return math.sqrt(freedom) * math.sinh(v) if v < 710 else math.inf


def _constant(freedom: float) -> float:
    """Return C of the module's formula. The direct quotient of two large gamma functions would lose digits."""
    x = freedom / 2
    if x < _STIRLING_MIN:
        return math.gamma(x + 0.5) / (math.sqrt(math.pi) * math.gamma(x))
    series = math.fsum(coefficient / x ** (2 * n + 1) for n, coefficient in enumerate(_STIRLING))
    return math.sqrt(x / math.pi) * math.exp(series)


def _log_cosh(v: float) -> float:
    return math.log1p(2 * math.sinh(v / 2) ** 2) if v < 1 else v + math.log1p(math.exp(-2 * v)) - math.log(2)


def _tail_ratio(v: float, freedom: float) -> float:
    """Return ∫_v^∞ (cosh w / cosh v)^-ν dw."""
    slope = math.tanh(v)
    scale = 1 / (freedom * slope + math.sqrt(freedom))
    values = []
    for node, weight in _NODES:
        w = scale * node
        if w < 1:
            growth = math.log1p(2 * math.sinh(w / 2) ** 2 + slope * math.sinh(w))
        else:
            growth = w + math.log((1 + slope) / 2 + (1 - slope) / 2 * math.exp(-2 * w))
        values.append(w * weight * math.exp(-freedom * growth))
    return math.fsum(values)


def _central_integral(v: float, freedom: float) -> float:
    """Return ∫_0^v (cosh w)^-ν dw by the double-exponential rule for a finite interval (tanh-sinh)."""
    values = []
    for node, weight in _NODES:
        rest = 1 / (1 + node * node)
        values.append(2 * weight * (1 - rest) * rest * math.exp(-freedom * _log_cosh(v * (1 - rest))))
    return v * math.fsum(values)


Score = tuple[str, float]
"""Task and score (0..1) of one play."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of scores or of differences, with its standard error."""

    value: float
    error: float
    over_seeds: float | None
    """Standard error over seeds; None for one seed."""
    over_tasks: float
    """Standard error over tasks."""
    by_seed: tuple[float, ...]
    """Mean of each seed."""

    def within(self, errors: float = 2.0) -> bool:
        """Return whether the mean is at most `errors` standard errors from 0."""
        return abs(self.value) <= errors * self.error

    def report(self) -> dict[str, object]:
        return {
            "mean": round(self.value, 4),
            "standard_error": round(self.error, 4),
            "over_seeds": None if self.over_seeds is None else round(self.over_seeds, 4),
            "over_tasks": round(self.over_tasks, 4),
            "by_seed": [round(value, 4) for value in self.by_seed],
        }


def mean(plays: Sequence[Sequence[Score]], *, shared: bool = False) -> Mean:
    """Return the mean score over all plays, with its standard error.

    Args:
        plays: for each seed, task and score of each play.
        shared: whether all seeds have the same tasks.
    """
    return _over(plays, shared)


def difference(plays: Sequence[Sequence[Score]], base: Sequence[Sequence[Score]], *, shared: bool = False) -> Mean:
    """Return the mean of the differences in score between `plays` and `base`, with its standard error.

    Args:
        plays: for each seed, task and score of each play of the version.
        base: the plays of the version that it is compared with, with the same seeds and tasks in the same order.
        shared: whether all seeds have the same tasks.
    """
    paired = []
    for run, base_plays in zip(plays, base, strict=True):
        pairs = list(zip(run, base_plays, strict=True))
        assert all(play[0] == base_play[0] for play, base_play in pairs), "the same tasks in the same order"
        paired.append([(task, score - base_score) for (task, score), (_, base_score) in pairs])
    return _over(paired, shared)


def certainty_above(gain: Mean, reference: Mean, share: float) -> float:
    """Return the probability that `gain` is more than `share` of `reference`. A negative `reference` counts as 0.

    Both means count as normal and independent. Gains over the same base are correlated positively, so the certainty
    of a real excess is rather too low.
    """
    excess = gain.value - share * max(reference.value, 0.0)
    error = math.hypot(gain.error, share * reference.error)
    return statistics.NormalDist().cdf(excess / error) if error else float(excess > 0)


def _over(seeds: Sequence[Sequence[Score]], shared: bool) -> Mean:
    means = [math.fsum(value for _, value in plays) / len(plays) for plays in seeds]
    over_seeds = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    if shared:
        over_tasks = _over_tasks([play for plays in seeds for play in plays])
        error = math.hypot(over_tasks, over_seeds or 0.0)
    else:
        over_tasks = math.sqrt(math.fsum(_over_tasks(plays) ** 2 for plays in seeds)) / len(seeds)
        error = max(over_tasks, over_seeds or 0.0)
    return Mean(math.fsum(means) / len(means), error, over_seeds, over_tasks, tuple(means))


def _over_tasks(plays: Sequence[Score]) -> float:
    """Return the standard error of the mean if tasks are drawn at random with all their plays (clusters).

    It is at least that of independent plays. With a single task it is half the range of scores.
    """
    mean_score = math.fsum(value for _, value in plays) / len(plays)
    residuals: dict[str, float] = defaultdict(float)
    for task, value in plays:
        residuals[task] += value - mean_score
    clusters = len(residuals)
    if clusters < 2:
        return 0.5
    clustered = math.fsum(rest * rest for rest in residuals.values()) * clusters / (clusters - 1) / len(plays) ** 2
    alone = math.fsum((value - mean_score) ** 2 for _, value in plays) / (len(plays) - 1) / len(plays)
    return math.sqrt(max(clustered, alone))  # with few tasks the cluster estimate can be too small by chance
