"""The confidence sequence, against the authors' own implementation, the definition, and chance."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest

from headrace_statistics.confidence_sequence import ConfidenceSequence

VALUES = [((7 * index * index + 3 * index) % 11) / 10 for index in range(200)]
AFTER = (1, 5, 20, 50, 100, 200)
CONFSEQ = {
    0.05: ((0.0, 1.0), (0.0, 0.894), (0.216, 0.652), (0.266, 0.548), (0.297, 0.506), (0.323, 0.48)),
    0.2: ((0.0, 1.0), (0.063, 0.787), (0.254, 0.599), (0.291, 0.518), (0.316, 0.486), (0.337, 0.466)),
}
"""The ends after so many of `VALUES` as in `AFTER`, by the formulas of `betting_cs` with
`lambda_predmix_eb(x, alpha=alpha / 2)` in the authors' package confseq (github.com/gostevehoward/confseq), on a grid of
thousandths that it widens by one on each side."""


@pytest.mark.parametrize("alpha", sorted(CONFSEQ))
def test_confidence_sequence_equals_the_authors_package(alpha: float) -> None:
    sequence = ConfidenceSequence(alpha)
    for number, value in enumerate(VALUES, 1):
        sequence.update(value)
        if number in AFTER:
            interval, (lower, upper) = sequence.interval(), CONFSEQ[alpha][AFTER.index(number)]
            assert lower - 1e-9 <= interval.lower <= lower + 0.002 or interval.lower == lower == 0.0
            assert upper - 0.002 <= interval.upper <= upper + 1e-9 or interval.upper == upper == 1.0


def test_confidence_sequence_equals_a_computation_by_hand() -> None:
    """α = 0.8 and a single 1: λ = √(2 ln 2.5 / (ln 2 / 4)) = 3.25, and the limit is 2/α = 2.5. Left of m = 1/2 / 3.25 =
    0.154, K⁺ = 1 + 3.25 (1 - m), which is more than 2.5; right of it K⁺ = 1 + (1 - m) / 2m = 2.5 at m = 1/4.
    """
    sequence = ConfidenceSequence(0.8)
    sequence.update(1.0)
    assert sequence.interval().lower == pytest.approx(0.25)
    assert sequence.interval().upper == 1.0


def test_confidence_sequence_covers_the_mean_at_all_times() -> None:
    """All 2^9 courses of nine tosses: the probability that the mean is ever left out is at most α, exactly summed."""
    for mean, alpha in ((Fraction(1, 2), 0.5), (Fraction(3, 4), 0.5), (Fraction(1, 5), 0.3)):
        missed = Fraction(0)
        for course in itertools.product((0, 1), repeat=9):
            sequence, out = ConfidenceSequence(alpha), False
            for toss in course:
                sequence.update(toss)
                interval = sequence.interval()
                out = out or not interval.lower <= mean <= interval.upper
            chance = math.prod((mean if toss else 1 - mean for toss in course), start=Fraction(1))
            missed += out * chance
        assert missed <= Fraction(alpha)


@pytest.mark.parametrize("seed", range(3))
def test_confidence_sequence_narrows_to_the_mean(seed: int) -> None:
    print(f"seed {seed}")
    chance, sequence, widths = random.Random(seed), ConfidenceSequence(0.05), []
    for number in range(1, 1001):
        sequence.update(chance.betavariate(6, 2))
        if number in (10, 100, 1000):
            interval = sequence.interval()
            widths.append(interval.upper - interval.lower)
            assert interval.lower <= 0.75 <= interval.upper
    assert widths[0] > widths[1] > widths[2]
    assert widths[2] < 0.05
