"""A family never spends more than it has, however many versions it has."""

from __future__ import annotations

from fractions import Fraction

import pytest

from headrace_statistics.spending import harm, promotion, refusal, success, succession


def test_spending_equals_a_computation_by_hand() -> None:
    assert [promotion(0.05, number) for number in (1, 2, 3)] == pytest.approx([0.02, 0.04 / 6, 0.04 / 12])
    assert [succession(0.05, number) for number in (1, 2)] == pytest.approx([0.005, 0.01 / 6])
    assert [refusal(0.05, opponents) for opponents in (1, 2)] == pytest.approx([0.025, 0.0125])
    assert [success(0.05, 2, metrics) for metrics in (1, 4)] == pytest.approx([0.04 / 6, 0.01 / 6])
    assert [harm(0.05, share) for share in (1.0, 0.25)] == pytest.approx([0.05, 0.0125])


@pytest.mark.parametrize("versions", [1, 40, 10_000])
def test_spending_never_exceeds_alpha(versions: int) -> None:
    """Σ 1/(k(k+1)) = 1 - 1/(n+1)."""
    spent = sum(promotion(0.05, number) + succession(0.05, number) for number in range(1, versions + 1))
    assert spent == pytest.approx(0.05 * float(1 - Fraction(1, versions + 1)))
    assert spent < 0.05
