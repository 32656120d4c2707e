"""Student's t: exact quantiles over all degrees of freedom, against closed forms and 60 digits of mpmath."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist

import mpmath
import pytest

from headrace_statistics.student_t import lower_bound, mean_margin, quantile

TOLERANCE = 1e-10
TAILS = (
    1e-300,
    1e-100,
    1e-30,
    1e-10,
    1e-6,
    0.0005,
    0.005,
    0.025,
    0.05,
    0.1,
    0.2,
    0.2499999,
    0.25,
    0.25000001,
    0.3,
    0.4,
)
NEAR_THE_CENTRE = (0.45, 0.49, 0.4999, 0.499999999)


def cauchy(p: float) -> float:
    """Return the quantile for one degree of freedom."""
    return -1 / math.tan(math.pi * p) if p < 0.25 else math.tan(math.pi * (p - 0.5))


def two(p: float) -> float:
    """Return the quantile for two degrees of freedom (Shaw, J. Computational Finance 9, 2006)."""
    return (2 * p - 1) / math.sqrt(2 * p * (1 - p))


def four(p: float) -> float:
    """Return the quantile for four degrees of freedom (Shaw 2006). Near the centre its subtraction loses digits."""
    with mpmath.workdps(400):
        share = mpmath.mpf(p)
        root = mpmath.sqrt(4 * share * (1 - share))
        size = 2 * mpmath.sqrt(mpmath.cos(mpmath.acos(root) / 3) / root - 1)
        return math.copysign(float(size), p - 0.5)


@pytest.mark.parametrize(("freedom", "closed_form"), [(1, cauchy), (2, two), (4, four)])
@pytest.mark.parametrize("p", TAILS + NEAR_THE_CENTRE)
def test_quantile_agrees_with_the_closed_forms(freedom: int, closed_form: Callable[[float], float], p: float) -> None:
    assert quantile(p, freedom) == pytest.approx(closed_form(p), rel=TOLERANCE)
    assert quantile(1 - p, freedom) == pytest.approx(-quantile(1 - (1 - p), freedom), rel=TOLERANCE)


def relative_error(t: float, p: float, freedom: float) -> float:
    """Return the relative error of the quantile `t`, from its probability in 60 digits and the density there."""
    with mpmath.workdps(60):
        nu, x, half = mpmath.mpf(freedom), abs(mpmath.mpf(t)), mpmath.mpf(1) / 2
        tail = min(mpmath.mpf(p), 1 - mpmath.mpf(p))
        if tail > 0.25:
            centre = mpmath.betainc(half, nu / 2, 0, x * x / (nu + x * x), regularized=True) / 2
            missing = half - tail - centre
        else:
            missing = mpmath.betainc(nu / 2, half, 0, nu / (nu + x * x), regularized=True) / 2 - tail
        density = mpmath.gamma((nu + 1) / 2) / mpmath.gamma(nu / 2) / mpmath.sqrt(nu * mpmath.pi)
        return abs(float(missing / (density * (1 + x * x / nu) ** (-(nu + 1) / 2) * x)))


@pytest.mark.parametrize("freedom", [0.1, 0.5, 1, 1.5, 2, 3, 5, 7, 8, 20, 39.9, 40.1, 100, 1e3, 1e5, 1e7])
def test_quantile_agrees_with_60_digits(freedom: float) -> None:
    seed = 17
    print(f"seed {seed}")
    chance = random.Random(f"{seed} {freedom}")
    probabilities = [*TAILS, *NEAR_THE_CENTRE, *(chance.random() for _ in range(10)), 0.975, 0.995, 1 - 1e-9]
    for p in probabilities:
        t = quantile(p, freedom)
        if math.isinf(t):  # the quantile itself is beyond the largest float
            assert mpmath.mpf(min(p, 1 - p)) ** (-1 / mpmath.mpf(freedom)) > mpmath.mpf("1e300")
            continue
        assert relative_error(t, p, freedom) < TOLERANCE, (p, freedom, t)


def test_quantile_is_the_normal_one_for_infinite_freedom() -> None:
    for p in (1e-12, 0.01, 0.2, 0.4, 0.6, 0.975):
        assert quantile(p, math.inf) == pytest.approx(NormalDist().inv_cdf(p), rel=1e-9)


def test_quantile_bounds() -> None:
    assert quantile(0.5, 3) == 0
    assert (quantile(0, 1), quantile(1, 1)) == (-math.inf, math.inf)
    assert quantile(0.975, 1) == pytest.approx(12.706204736174694, rel=1e-14)
    for p, freedom in ((-0.1, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.5, 0.0), (0.5, -1.0), (0.5, math.nan)):
        with pytest.raises(ValueError, match="must be"):
            quantile(p, freedom)


def test_the_expansion_that_was_used_before_is_caught() -> None:
    """The planted fault: Abramowitz and Stegun 26.7.5 at one and two degrees of freedom."""

    def expansion(p: float, freedom: float) -> float:
        x = NormalDist().inv_cdf(p)
        terms = (x**3 + x) / 4, (5 * x**5 + 16 * x**3 + 3 * x) / 96, (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384
        fourth = (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160
        return x + sum(term / freedom**power for power, term in enumerate((*terms, fourth), 1))

    assert expansion(0.975, 1) == pytest.approx(11.30, abs=0.01)
    assert relative_error(expansion(0.975, 1), 0.975, 1) > 0.05
    assert relative_error(expansion(0.975, 8), 0.975, 8) > TOLERANCE


def test_margins_of_few_values() -> None:
    assert mean_margin([1.0, 2.0], 0.975) == pytest.approx(12.706204736174694 * math.sqrt(0.5) / math.sqrt(2))
    assert math.isinf(mean_margin([1.0], 0.975))
    assert lower_bound([1.0, 2.0], 0.025) == pytest.approx(1.5 - mean_margin([1.0, 2.0], 0.975))
    assert lower_bound([1.0], 0.025) == -math.inf
    assert lower_bound([], 0.025) == -math.inf
