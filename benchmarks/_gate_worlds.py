"""Simulated versions and tasks: scores of many runs at once, drawn with a known truth.

A task is equally hard for all versions. Success means that a latent normal variable, of which task and seed determine
the share `SHARED`, exceeds the threshold of the version's true score. At a true score of 0.5 and a share of 0.5, the
scores of two versions on the same task have a correlation of (2/π) asin(0.5) = 0.33.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHARED = 0.5


def thresholds(true: Floats) -> Floats:
    """Return the thresholds of versions with these true scores, elementwise."""
    values, indices = np.unique(np.clip(true, 1e-9, 1 - 1e-9), return_inverse=True)
    limits: Floats = np.array([NormalDist().inv_cdf(float(value)) for value in values])[indices].reshape(true.shape)
    return limits


def scores(draw: np.random.Generator, limits: Floats, hardness: Floats) -> Floats:
    """Return 0 or 1 for each of `limits` (players by runs). All players of a run play one task of the given
    hardness."""
    player_noise: Floats = draw.standard_normal(limits.shape)
    won: Floats = (SHARED**0.5 * hardness + (1 - SHARED) ** 0.5 * player_noise < limits).astype(np.float64)
    return won
