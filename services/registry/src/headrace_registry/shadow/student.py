"""Quantiles of Student's t distribution, where they are right to three digits."""

from __future__ import annotations

from headrace_runtime import student

FREEDOM_MIN = 8.0


def quantile(probability: float, freedom: float) -> float:
    """Where the distribution function is `probability`. Fewer degrees of freedom than 8 are refused: `ValueError`."""
    if freedom < FREEDOM_MIN:
        raise ValueError(f"{freedom:g} degrees of freedom: the expansion needs {FREEDOM_MIN:g} or more")
    return student.quantile(probability, freedom)
